"""What a conversion will take is what it takes."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from small_builds import BITS, HIGH_COUNTS, scrambled, write_source
from tiny_k3 import t1_config

from kimi_k3 import convert
from kimi_k3.build.layer_reader import LayerReader
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.conversion.conversion_cost import QUANTISING_SPEEDS, conversion_cost
from kimi_k3.conversion.convert_checks import SPARE_BYTES
from kimi_k3.conversion.shard_writer import ShardWriter
from kimi_k3.errors import ConversionError, PlanError
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

GRADED = scrambled(high=HIGH_COUNTS, bits=BITS)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.mark.parametrize("plan", [None, GRADED], ids=["none", "graded"])
def test_bytes_are_those_of_a_conversion(
    source: Path, plan: ExpertPlan | None, tmp_path: Path, monkeypatch: Any
):
    cost = conversion_cost(read_config(source), plan)
    read, copy = LayerReader.read, ShardWriter.copy
    taken = []

    def counted(reader: LayerReader, names: list[str], *rest: Any) -> Any:
        taken.append(reader.nbytes(names))
        return read(reader, names, *rest)

    def copied(writer: ShardWriter, *args: Any) -> int:
        taken.append(copy(writer, *args))
        return taken[-1]

    put = ShardWriter.put_bytes

    def scales(writer: ShardWriter, name: str, content: Any, start: int = 0) -> None:
        if isinstance(content, bytes):  # read to be looked at
            taken.append(len(content))
        put(writer, name, content, start)

    monkeypatch.setattr(LayerReader, "read", counted)
    monkeypatch.setattr(ShardWriter, "copy", copied)
    monkeypatch.setattr(ShardWriter, "put_bytes", scales)
    out = convert(source, tmp_path / "out", plan)
    # A_log is padded to another length than the release's in T1.
    padding = 4 * 4 * (32 - 6)
    assert cost.read - padding == sum(taken)
    shards = list(out.glob("*.safetensors"))
    assert cost.written == sum(path.stat().st_size for path in shards)
    assert cost.shards == len(shards)
    assert cost.free_disk == cost.written + SPARE_BYTES
    if plan is None:
        assert cost.read == cost.source
        assert cost.quantised == 0
    else:
        assert cost.read < cost.source


def test_quantised_weights_are_counted():
    config = t1_config(moe_intermediate_size=64, routed_expert_hidden_size=64)
    plan = scrambled(high=HIGH_COUNTS, bits={"lm_head": 6})
    experts = sum(len(layer.low) for layer in plan.layers.values())
    assert conversion_cost(config, plan).quantised == experts * 3 * 64 * 64 + 576 * 64


def test_hours():
    config = t1_config(moe_intermediate_size=64, routed_expert_hidden_size=64)
    cost = conversion_cost(
        config, disk_speeds=[1e9, 2e9], quantising_speeds={"one": 1e9}
    )
    slow, fast = cost.estimates
    assert slow.hours["one"] == pytest.approx((cost.read + cost.written) / 3.6e12)
    assert fast.hours["one"] == pytest.approx(slow.hours["one"] / 2)
    graded = conversion_cost(
        config, GRADED, disk_speeds=[1e9], quantising_speeds={"one": 1e3}
    )
    wanted = (graded.read + graded.written) / 1e9 + graded.quantised / 1e3
    assert graded.estimates[0].hours["one"] == pytest.approx(wanted / 3600)
    assert "with one" in graded.text()
    assert f"{graded.quantised / 1e9:.2f} billion" in graded.text()
    assert "an assumption" in graded.text()
    assert "with one" not in cost.text()
    assert "an assumption" not in cost.text()


def test_the_speed_of_a_core_is_what_was_measured():
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "quantizer.json"
    timed = json.loads(results.read_text())["matrices"]["normal, MXFP4"]
    speeds = [
        3072 * 3584 / case["seconds"]
        for by_bits in timed.values()
        for case in by_bits.values()
    ]
    assert min(speeds) < QUANTISING_SPEEDS["one CPU core"] < max(speeds)


def test_full_size_figures():
    layers = dict.fromkeys(
        range(1, 93), LayerPlan(tuple(range(100)), tuple(range(100, 300)))
    )
    plan = ExpertPlan(896, 16, layers, about={"kind": "graded"})
    cost = conversion_cost(full_size_config(), plan)
    assert cost.source == 1_560_860_324_864
    assert cost.quantised == 92 * 200 * 3 * 3072 * 3584
    assert 2e9 < cost.peak_memory < 10e9
    assert cost.to_dict()["peak_memory"] == sum(cost.memory.values())
    assert "graded; 300 experts in each of 92 layers" in cost.text()


@pytest.mark.parametrize("plan", [None, GRADED], ids=["none", "graded"])
def test_memory_is_foretold(source: Path, plan: ExpertPlan | None, tmp_path: Path):
    cost = conversion_cost(read_config(source), plan)
    arrays = cost.peak_memory - cost.memory["names of tensors, Python"]
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    convert(source, tmp_path / "out", plan)
    peak = mx.get_peak_memory() - held
    assert 0 < peak < arrays


def test_settings_that_make_no_sense():
    with pytest.raises(ConversionError, match="a speed is 0, wanted more than 0"):
        conversion_cost(t1_config(), disk_speeds=[0])
    with pytest.raises(PlanError, match="checkpoint with experts = 16"):
        conversion_cost(full_size_config(), GRADED)
