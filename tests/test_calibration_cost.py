"""The dry run: bytes to the byte, arithmetic against the model's own parameters."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from calibration_cases import CORPORA, samples_for, write_source
from mlx.utils import tree_flatten
from tiny_k3 import t1_config

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.calibration_cost import (
    CalibrationCost,
    Speed,
    calibration_cost,
    sizes_of_folder,
)
from kimi_k3.build.calibration_storage import moment_bytes, state_traffic
from kimi_k3.build.hidden_states import EMBEDDED, HiddenStates
from kimi_k3.build.input_moments import LayerMoments
from kimi_k3.build.layer_flop import (
    RECORDING,
    layer_flop,
    stored_blocks_before,
    stores_block,
)
from kimi_k3.checkpoint.source_layout import full_size_config, layer_tensors
from kimi_k3.cli import build_parser, main
from kimi_k3.config import ModelArgs
from kimi_k3.errors import CalibrationError, ConfigError
from kimi_k3.models import Model
from kimi_k3.verbs.calibrate_dry_run import cost_of

RELEASE_BYTES = 1_560_860_324_864

#: Parameters that a token meets, as published; the embedding is one row of it.
ACTIVE = 104e9

LENGTH = 12


def small_args(**text: Any) -> ModelArgs:
    return ModelArgs.from_dict(t1_config(**text))


def small_cost(args: ModelArgs | None = None, **settings: Any) -> CalibrationCost:
    usual: dict[str, Any] = {
        "rows": 4,
        "length": LENGTH,
        "step_tokens": 24,
        "memory_limit": 0,
    }
    return calibration_cost(args or small_args(), **usual | settings)


@pytest.fixture(scope="module")
def release_cost() -> CalibrationCost:
    """The command of the page, about the released model."""
    start = time.process_time()
    command = ["calibrate", "--dry-run", "--samples", "general", "--memory-limit", "64"]
    cost = cost_of(build_parser().parse_args(command))
    assert time.process_time() - start < 30
    return cost


@pytest.fixture(scope="module")
def release(release_cost: CalibrationCost) -> dict[str, Any]:
    return json.loads(json.dumps(release_cost.to_dict()))


def test_page_shows_what_the_command_prints(release_cost: CalibrationCost):
    page = (Path(__file__).parent.parent / "docs" / "calibrating.md").read_text()
    shown = page.split("<!-- dry run -->\n```\n")[1].split("```\n")[0]
    assert shown == release_cost.text() + "\n"


def test_release_is_read_but_for_head_and_vision(release: dict[str, Any]):
    head = 163_840 * 7168 * 2
    not_read = release["sizes"]["not_read"]
    assert not_read["head"] == head
    assert pytest.approx(not_read["vision"], rel=0.01) == 447e6 * 2
    assert release["bytes_stored"] == RELEASE_BYTES
    assert release["bytes_read"] == RELEASE_BYTES - head - not_read["vision"]
    layers = release["sizes"]["layers"]
    assert len(layers) == 93
    assert layers[release["largest_layer"]] == max(layers)


def test_release_needs_two_layers_and_its_states(release: dict[str, Any]):
    memory, layers = release["memory"], release["sizes"]["layers"]
    pair = max(a + b for a, b in zip(layers, layers[1:], strict=False))
    weights = memory["the layer in use"] + memory["the next layer, being read"]
    assert weights == pair
    array = release["tokens"] * 7168 * 2
    assert memory["hidden states held"] == 9 * array < 64e9
    assert release["disk"]["residual blocks"] == 8 * array
    assert pair + 9 * array < release["peak_memory"] < pair + 9 * array + 12e9


def test_release_computes_with_what_is_active(release: dict[str, Any]):
    per_token = release["total_flop"] / release["tokens"] / 2
    assert per_token == pytest.approx(ACTIVE, rel=0.03)
    assert len(release["estimates"]) == 12


def walked(model: Model, layer: int, args: ModelArgs) -> int:
    """Operations of a token in ``layer``, from the parameters of the built model."""
    text, total = args.text_config, 0
    flat: list[tuple[str, mx.array]] = tree_flatten(
        model.model.layers[layer].parameters()
    )  # type: ignore[assignment]
    for name, array in flat:
        if array.ndim < 2 or "_res_proj" in name:
            continue
        met = array.size
        if ".switch_mlp." in name:
            met = met // array.shape[0] * text.num_experts_per_token
        total += 2 * met
    return total


@pytest.mark.parametrize("change", [{}, {"q_lora_rank": None, "num_experts": 8}])
def test_arithmetic_is_that_of_the_parameters(change: dict[str, Any]):
    args = small_args(**change)
    text, model = args.text_config, Model(args)
    heads, state, head = 4, 32 * 32, 16 + 8 + 16
    # Candidates of both mixes of a layer; blocks of two layers, the first mix of the
    # first layer has none.
    candidates = [0 + 2, 2 + 2, 2 + 3, 3 + 3, 3 + 4]
    for layer, count in enumerate(candidates):
        mla = layer == 3
        beside = 2 * LENGTH * heads * head if mla else 7 * heads * state
        tensors = list(layer_tensors(text, layer, (heads,)))
        parts = layer_flop(text, layer, tensors, LENGTH)
        found = sum(n for part, n in parts.items() if part != RECORDING)
        assert found == walked(model, layer, args) + beside + 6 * count * 64
        more = replace(text, num_experts_per_token=2)
        other = layer_flop(more, layer, tensors, LENGTH)
        assert (other == parts) == (layer == 0)


def test_recording_is_counted_where_experts_are():
    text = small_args().text_config
    found = [
        layer_flop(text, layer, [], LENGTH, moments=moments)[RECORDING]
        for layer, moments in ((0, True), (1, False), (1, True))
    ]
    assert found == [0, 2 * 4 * 32, 2 * 4 * 32 + 2 * 16 * 32 + 3 * 4 * 32]


@pytest.mark.parametrize("arrays", [0, 1, 2, 3, 9])
def test_states_are_held_as_the_code_holds_them(arrays: int, tmp_path: Path):
    text = small_args(num_hidden_layers=5).text_config
    rows, length, hidden = 2, 3, 8
    array = rows * length * hidden * 2
    limit = arrays * array
    values = mx.zeros((rows, length, hidden), dtype=mx.bfloat16)
    states = HiddenStates(rows, length, hidden, mx.bfloat16, tmp_path / "s", limit)
    states.write(0, values)
    states.commit(EMBEDDED)
    traffic = state_traffic(text, array, limit)
    held, stored = [states.held_bytes], 1
    for layer in range(5):
        assert traffic.read[layer] == stored * array - held[-1]
        pushed = values if stores_block(text, layer) else None
        states.write(0, values, pushed)
        states.commit(layer)
        held.append(states.held_bytes)
        stored = states.blocks + 1
        assert states.blocks == stored_blocks_before(text, layer + 1)
        assert traffic.written[layer] == array * (1 + (pushed is not None))
    assert traffic.held == max(held)


def test_disk_is_what_a_calibration_writes(tmp_path: Path):
    source = write_source(tmp_path / "t1")
    samples = samples_for(source)
    calibrate(source, samples, tmp_path / "out")
    config = json.loads((source / "config.json").read_text())
    args = ModelArgs.from_dict(config)
    for layer in range(3):
        moments = LayerMoments.load(
            tmp_path / "out" / "moments" / f"layer-{layer:03d}.npz"
        )
        kept = [*moments.matrices.values(), moments.gate_up, moments.down]
        tensors = list(layer_tensors(args.text_config, layer, (4,)))
        found = moment_bytes(args.text_config, layer, tensors, len(CORPORA))
        assert found == sum(array.nbytes for array in kept if array is not None)


def test_sizes_of_a_folder_are_those_of_its_shards(tmp_path: Path):
    source = write_source(tmp_path / "t1")
    args = ModelArgs.from_dict(json.loads((source / "config.json").read_text()))
    found, computed = sizes_of_folder(source), small_cost(args).sizes
    heads = args.text_config.linear_attn_config
    padding = 4 * (heads.head_dim - 6)  # A_log lies there with six values
    assert found.total == computed.total - 2 * padding
    assert found.layers[1] == computed.layers[1]
    assert found.not_read == computed.not_read
    assert (found.embedding, found.output) == (computed.embedding, computed.output)


def test_hours_are_those_of_the_slower_side():
    speeds = [Speed(1.0, 1e30), Speed(1e30, 1.0), Speed(1.0, 1.0)]
    cost = small_cost(speeds=speeds)
    disk, compute, both = (estimate.hours * 3600 for estimate in cost.estimates)
    array = 4 * LENGTH * 64 * 2
    files = sum(layer.files for layer in cost.layers)
    assert disk == pytest.approx(cost.sizes.read + array + files)
    assert compute == pytest.approx(sum(cost.flop.values()))
    assert max(disk, compute) < both < disk + compute
    assert [e.layers_waiting for e in cost.estimates[:2]] == [5, 0]


def test_moments_and_the_limit_make_a_difference():
    usual = small_cost(memory_limit=1 << 30)
    without = small_cost(memory_limit=1 << 30, moments=False)
    spilled = small_cost()
    assert without.peak_memory < usual.peak_memory
    assert without.kept < usual.kept
    assert without.sizes.read == usual.sizes.read - usual.sizes.output
    assert without.sizes.total == usual.sizes.total
    assert usual.memory["hidden states held"] == 4 * 4 * LENGTH * 64 * 2
    assert spilled.memory["hidden states held"] == 0
    assert usual.estimates[0].hours < spilled.estimates[0].hours


@pytest.mark.parametrize(
    "setting", [{"rows": 0}, {"length": 0}, {"step_tokens": 0}, {"corpora": 0}]
)
def test_settings_that_mean_nothing_are_refused(setting: dict[str, Any]):
    with pytest.raises(CalibrationError, match=next(iter(setting))):
        small_cost(**setting)


def test_speeds_and_models_that_mean_nothing_are_refused():
    with pytest.raises(CalibrationError, match="disk is 0"):
        Speed(0, 1)
    with pytest.raises(ConfigError, match="no layer of this checkpoint has routed"):
        small_cost(small_args(num_experts=0))


def write_mix(path: Path, tokens: int = 48) -> Path:
    path.write_text(
        f"tokens = {tokens}\nlength = {LENGTH}\n"
        '[[corpus]]\nname = "a"\nshare = 1\nfiles = ["none.txt"]\n'
    )
    return path


def test_command_takes_a_config_and_a_mix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(t1_config()))
    mix = write_mix(tmp_path / "mix.toml")
    command = ["calibrate", str(tmp_path), "--dry-run", "--samples", str(mix)]
    limit = ["--memory-limit", "1"]
    assert main([*command, *limit]) == 0
    text = capsys.readouterr().out
    assert text == small_cost(step_tokens=2048, memory_limit=10**9).text() + "\n"
    for words in ("4 rows of 12 tokens", "each byte once", "not read: head", "TFLOPS"):
        assert words in text
    assert main([*command, *limit, "--disk", "2", "--compute", "8"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row for row in rows if "GB/s" in row][0].split()[:2] == ["2", "GB/s"]
    assert main([*command, "--disk", "0"]) == 2
    assert "--disk is 0.0, wanted more than 0" in capsys.readouterr().err


def test_command_reads_sizes_off_shards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    source, mix = write_source(tmp_path / "t1"), write_mix(tmp_path / "mix.toml")
    command = ["calibrate", str(source), "--dry-run", "--json", "--samples", str(mix)]
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_stored"] == sizes_of_folder(source).total
    assert main(["calibrate", str(tmp_path / "no"), "--dry-run"]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_release_config_is_the_default(release: dict[str, Any]):
    text = ModelArgs.from_dict(full_size_config()).text_config
    assert len(release["layers"]) == text.num_hidden_layers
    assert (release["rows"], release["length"]) == (128, 2048)
