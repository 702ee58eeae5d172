"""Expert counts that differ from layer to layer (B37): converted, reloaded, answering."""

import json
from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from damage import copy_folder, edit_config, edit_text_config, refuse
from loading import load_stored
from small_builds import COUNTS, scrambled
from tiny_k3 import write_t1

import kimi_k3
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.verify_record import RecordedBuild
from kimi_k3.checkpoint.folder import read_folder
from kimi_k3.conversion.convert import convert
from kimi_k3.errors import CheckpointError, ConfigError, PlanError

#: With an entry for the dense layer.
STATED = [0, *COUNTS]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T1, whose experts are too narrow for a low bank."""
    return write_t1(tmp_path_factory.mktemp("source"), tokenizer=True)


@pytest.fixture(scope="module")
def uneven(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(source, tmp_path_factory.mktemp("out") / "build", scrambled())


@pytest.fixture
def copy(uneven: Path, tmp_path: Path) -> Path:
    return copy_folder(uneven, tmp_path / "build")


def test_the_config_states_every_layer(uneven: Path, source: Path) -> None:
    text = json.loads((uneven / "config.json").read_text())["text_config"]
    assert text["expert_counts"] == STATED
    assert text["num_experts"] == 16
    assert "expert_bank_split" not in text
    assert kimi_k3.verify(uneven, source).passed


def test_stock_mlx_lm_loads_and_generates(uneven: Path) -> None:
    model, tokenizer, *_ = mlx_lm.load(str(uneven))
    assert type(model).__module__ == "kimi_k3.models.kimi_k3"
    loaded: Any = model
    sizes = [
        layer.mlp.switch_mlp.experts if hasattr(layer.mlp, "switch_mlp") else 0
        for layer in loaded.layers
    ]
    assert sizes == STATED
    routers = [layer.mlp.gate.weight.shape[0] for layer in loaded.layers[1:]]
    assert routers == STATED[1:]
    text = mlx_lm.generate(model, tokenizer, prompt="ab", max_tokens=12)
    assert text


def test_tools_read_the_same_list(uneven: Path) -> None:
    stream = LayerStream(uneven)
    layers = range(stream.num_layers)
    assert [stream.args.experts_in_layer(layer) for layer in layers] == STATED
    recorded = RecordedBuild.of(read_folder(uneven)[0])
    assert recorded is not None
    assert [len(recorded.plan.order(layer)) for layer in layers] == STATED
    assert [len(recorded.record.kept.get(layer, ())) for layer in layers] == STATED
    loaded = load_stored(uneven)
    assert [loaded.args.text_config.experts_in_layer(n) for n in layers] == STATED


@pytest.mark.parametrize("counts", [STATED[1:], [*STATED, 8]])
def test_a_list_of_another_length_is_refused(copy: Path, counts: list[int]) -> None:
    edit_text_config(copy, expert_counts=counts)
    message = f"expert_counts has {len(counts)} entries.*5"
    refuse(copy, ConfigError, message)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_count_that_contradicts_the_tensors_is_refused(
    copy: Path, layer: int
) -> None:
    counts = [*STATED]
    counts[layer] -= 1
    edit_text_config(copy, expert_counts=counts)
    message = f"layer {layer}: config.json's expert_counts says {counts[layer]} experts"
    refuse(copy, CheckpointError, message)


def test_one_number_for_all_is_refused(copy: Path) -> None:
    """What a tool writes that knows one count only."""
    edit_config(copy, lambda config: config["text_config"].pop("expert_counts"))
    refuse(copy, CheckpointError, "layer 1: config.json's num_experts says 16 experts")


def test_a_plan_that_keeps_too_few_is_refused() -> None:
    with pytest.raises(
        PlanError, match="layer 4 keeps 3 experts but the router picks 4"
    ):
        scrambled((12, 9, 16, 3))
