"""``A_log`` has one value per head; what the file stores behind them never matters."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, assert_same, relative_error
from golden_data import read_stored
from loading import load_stored
from mlx_lm.utils import load_model
from oracle_pair import MODULE, Pair, float64, read_pair
from tiny_k3 import t1_config

from kimi_k3.errors import CheckpointError
from kimi_k3.nano.random_checkpoint import write_random_checkpoint

#: Heads, head_dim and stored length; in the last two the length looks per channel.
SHAPES = {"4 of 6": (4, 32, 6), "24 of 32": (24, 32, 32), "3 of 32": (3, 32, 32)}


@pytest.fixture(scope="module", params=SHAPES)
def folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A zero-padded source checkpoint."""
    heads, head_dim, stored = SHAPES[request.param]
    linear = {"num_heads": heads, "head_dim": head_dim}
    config = t1_config(linear_attn_config=linear)
    target = tmp_path_factory.mktemp("t1") / "build"
    return write_random_checkpoint(target, config, a_log_stored=stored)


def rewritten(folder: Path, target: Path, change: Any) -> Path:
    """A copy of ``folder`` in which ``change`` was applied to each ``A_log``."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
            continue
        tensors: Any = mx.load(str(file))
        for name in tensors:
            if name.endswith(".A_log"):
                tensors[name] = change(tensors[name])
        mx.save_safetensors(str(target / file.name), tensors, {"format": "pt"})
    return target


def heads_of(folder: Path) -> int:
    return len(load_stored(folder).layers[0].self_attn.A_log)


IDS = mx.array([[5, 1, 80, 33, 2, 17, 41]])


def test_padding_never_changes_the_logits(folder: Path, tmp_path: Path) -> None:
    heads = heads_of(folder)
    want = load_stored(folder)(IDS)

    def fill(a_log: mx.array) -> mx.array:
        return mx.concatenate([a_log[:heads], mx.full((a_log.size - heads,), 7.0)])

    with pytest.warns(UserWarning, match=r"self_attn\.A_log holds .* not zero"):
        model, _ = load_model(rewritten(folder, tmp_path / "filled", fill))
    assert_same(model(IDS), want, where="logits")


def test_a_changed_head_changes_the_logits(folder: Path, tmp_path: Path) -> None:
    """Broken twin: the last value that is a head's."""
    heads = heads_of(folder)
    want = load_stored(folder)(IDS)

    def change(a_log: mx.array) -> mx.array:
        a_log[heads - 1] = 3.0
        return a_log

    got = load_stored(rewritten(folder, tmp_path / "changed", change))(IDS)
    assert relative_error(got, want) > 1e-3


def test_too_few_values_are_refused(folder: Path, tmp_path: Path) -> None:
    heads = heads_of(folder)
    short = rewritten(folder, tmp_path / "short", lambda a_log: a_log[: heads - 1])
    wanted = rf"layers\.\d\.self_attn\.A_log has {heads - 1} values.* {heads};"
    with pytest.raises(CheckpointError, match=wanted):
        load_model(short)


def test_first_entries_per_head_are_the_oracle(folder: Path) -> None:
    pair: Pair = read_pair(folder)
    stored = read_stored(folder)["language_model.model.layers.0.self_attn.A_log"]
    assert stored.size > pair.oracle.config["linear_attn_config"]["num_heads"]
    x = pair.inputs(1, 33)
    want, _, _ = pair.oracle.attend(0, float64(x[0]))
    got = pair.model.layers[0].self_attn(x)
    assert_close(got[0], np.array(want), rel=MODULE, where="KDA output")
