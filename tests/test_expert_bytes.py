"""Packed experts are read in the right number format, or refused by name (B28)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_same, to_numpy
from golden_data import read_stored
from loading import load_stored
from mlx_lm.utils import load_model
from oracle_mxfp4 import mxfp4
from tiny_k3 import write_t1

from kimi_k3.errors import CheckpointError, ConfigError

LAYER = 2
EXPERTS = "language_model.model.layers.2.block_sparse_moe.experts"
MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

Tensors = dict[str, mx.array]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source checkpoint whose expert 3 has the extreme scale bytes in its rows."""
    folder = write_t1(tmp_path_factory.mktemp("t1"))

    def extreme(tensors: Tensors) -> None:
        scale = f"{EXPERTS}.3.w1.weight_scale"
        if scale in tensors:
            rows = to_numpy(tensors[scale]).copy()
            rows[0], rows[1], rows[2] = 0, 127, 254
            tensors[scale] = mx.array(rows)

    rewrite(folder, extreme)
    return folder


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> None:
    """Apply ``change`` to the tensors of every shard of ``folder``."""
    for file in folder.glob("model-*.safetensors"):
        tensors: Any = mx.load(str(file))
        mx.eval(tensors)
        change(tensors)
        mx.save_safetensors(str(file), tensors, {"format": "pt"})


def copy_of(folder: Path, target: Path) -> Path:
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def reconfigured(folder: Path, target: Path, change: Callable[[dict], None]) -> Path:
    """A copy of ``folder`` whose config.json was given to ``change``."""
    copy_of(folder, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_every_expert_is_dequantised_bit_for_bit(folder: Path) -> None:
    stored = read_stored(folder)
    bank = load_stored(folder).layers[LAYER].mlp.switch_mlp
    for matrix, ours in MATRICES.items():
        layer = bank[ours]
        assert (layer.mode, layer.bits, layer.group_size) == ("mxfp4", 4, 32)
        values = mx.dequantize(
            layer.weight,
            layer.scales,
            group_size=32,
            bits=4,
            mode="mxfp4",
            dtype=mx.float32,
        )
        assert len(values) == 16
        for expert in range(16):
            at = f"{EXPERTS}.{expert}.{matrix}.weight"
            packed, scale = stored[f"{at}_packed"], stored[f"{at}_scale"]
            with np.errstate(over="ignore"):  # 2^127 times 2 and more is infinite
                want = mxfp4(to_numpy(packed), to_numpy(scale)).astype(np.float32)
            assert_same(values[expert], want, where=at)


def test_extreme_scales_by_hand(folder: Path) -> None:
    """Scale bytes 0, 127 and 254 are 2^-127, 1 and 2^127."""
    gate = load_stored(folder).layers[LAYER].mlp.switch_mlp.gate_proj
    assert to_numpy(gate.scales[3, :3, 0]).tolist() == [0, 127, 254]
    rows = mx.dequantize(
        gate.weight[3, :3],
        gate.scales[3, :3],
        group_size=32,
        bits=4,
        mode="mxfp4",
        dtype=mx.float32,
    )
    magnitudes = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}
    for row, exponent in zip(to_numpy(rows), (-127, 0, 127), strict=True):
        finite = np.abs(row[np.isfinite(row)]).astype(np.float64)
        assert set((finite * 2.0**-exponent).tolist()) <= magnitudes
        assert finite.max() >= 2.0**exponent


def test_swapped_nibbles_are_seen(folder: Path) -> None:
    """Broken twin: the same bytes with the high nibble first."""
    stored = read_stored(folder)
    at = f"{EXPERTS}.0.w1.weight"
    packed, scale = to_numpy(stored[f"{at}_packed"]), to_numpy(stored[f"{at}_scale"])
    with pytest.raises(AssertionError, match="values differ"):
        assert_same(
            mxfp4((packed >> 4) | (packed << 4), scale), mxfp4(packed, scale), where=at
        )


def test_a_nan_scale_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = copy_of(folder, tmp_path / "nan")
    name = f"{EXPERTS}.5.w3.weight_scale"

    def spoil(tensors: Tensors) -> None:
        if name in tensors:
            scales = to_numpy(tensors[name]).copy()
            scales[4, 0] = 255
            tensors[name] = mx.array(scales)

    rewrite(broken, spoil)
    with pytest.raises(CheckpointError, match=rf"{name} .*255.* NaN"):
        load_model(broken)


def other_format(name: str) -> Callable[[dict], None]:
    def change(config: dict) -> None:
        config["text_config"]["quantization_config"]["format"] = name

    return change


@pytest.mark.parametrize("name", ["float-quantized", "pack-quantized", "nonsense"])
def test_another_format_is_refused_by_name(
    folder: Path, tmp_path: Path, name: str
) -> None:
    build = reconfigured(folder, tmp_path / "other", other_format(name))
    with pytest.raises(ConfigError, match=f"'{name}'.*mxfp4-pack-quantized"):
        load_model(build)


def to_top_level(config: dict) -> None:
    block = config["text_config"].pop("quantization_config")
    config["quantization_config"] = block


def everywhere(config: dict) -> None:
    config["quantization_config"] = config["text_config"]["quantization_config"]


def nowhere(config: dict) -> None:
    del config["text_config"]["quantization_config"]


@pytest.mark.parametrize("place", [to_top_level, everywhere, nowhere])
def test_where_the_block_stands_changes_nothing(
    folder: Path, tmp_path: Path, place: Callable[[dict], None]
) -> None:
    """The source has it under text_config; without any, the tensors decide."""
    ids = mx.array([[5, 1, 80, 33]])
    intact = load_stored(folder)
    intact.layers[LAYER].mlp.e_score_correction_bias[3] = -9.0  # holds infinities
    moved = load_stored(reconfigured(folder, tmp_path / "moved", place))
    moved.layers[LAYER].mlp.e_score_correction_bias[3] = -9.0
    assert_same(moved(ids), intact(ids), where="logits")
