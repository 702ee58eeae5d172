"""``expert_top_p``: which slots stay, where the option is taken, what is not run."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error, to_numpy
from mlx_lm.utils import load_model
from tiny_k3 import write_t2

from kimi_k3.config import ModelArgs
from kimi_k3.errors import ConfigError
from kimi_k3.models.expert_top_p import keep_top_p


def smallest_set(weights: np.ndarray, p: float) -> np.ndarray:
    """:func:`keep_top_p` of one token, by adding up one expert after another."""
    kept, taken = np.zeros_like(weights), 0.0
    for slot in np.argsort(-weights, kind="stable"):
        if taken >= p * weights.sum():
            break
        kept[slot] = weights[slot]
        taken += weights[slot]
    return kept * weights.sum() / kept.sum()


@pytest.mark.parametrize("p", [1e-6, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("slots", [1, 3, 16])
def test_the_smallest_set_is_kept(p: float, slots: int) -> None:
    weights = mx.random.uniform(shape=(2, 33, slots), key=mx.random.key(slots))
    kept = to_numpy(keep_top_p(weights, p))
    for got, given in zip(
        kept.reshape(-1, slots), to_numpy(weights).reshape(-1, slots), strict=True
    ):
        want = smallest_set(given.astype(np.float64), p)
        assert ((got != 0) == (want != 0)).all()
        assert_close(got, want, rel=1e-6, where="weights")


def test_all_of_the_weight_is_all_experts() -> None:
    weights = mx.random.uniform(shape=(5, 16), key=mx.random.key(1))
    assert_close(keep_top_p(weights, 1.0), weights, rel=1e-6)


def test_by_hand() -> None:
    got = keep_top_p(mx.array([[0.1, 0.5, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]]), 0.65)
    assert_close(got[0, 1], 5 / 7, rel=1e-6)
    assert sorted((to_numpy(got) != 0).sum(-1).tolist()) == [2, 3]
    assert_close(got.sum(axis=-1), np.ones(2), rel=1e-6)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t2(tmp_path_factory.mktemp("t2"))


def logits(folder: Path, **options: Any) -> mx.array:
    model = load_model(folder, model_config=options)[0]
    return model(mx.array([[5, 1, 80, 33, 7]]))


def test_an_option_of_the_host_and_a_key_of_the_build(
    graded: Path, tmp_path: Path
) -> None:
    """At the top of the config and in text_config, the same; off, as if not there."""
    plain = logits(graded)
    at_top = logits(graded, expert_top_p=0.5)
    assert relative_error(at_top, plain) > 1e-3
    assert relative_error(logits(graded, expert_top_p=1.0), plain) < 1e-5
    assert relative_error(logits(graded, expert_top_p=None), plain) == 0
    for file in graded.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((graded / "config.json").read_text())
    config["text_config"]["expert_top_p"] = 0.5
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert relative_error(logits(tmp_path), at_top) == 0
    assert relative_error(logits(tmp_path, expert_top_p=None), plain) == 0


@pytest.mark.parametrize("value", [0, -0.5, 1.01, "0.9", True, float("nan")])
def test_other_values_are_refused(graded: Path, value: Any) -> None:
    config = json.loads((graded / "config.json").read_text())
    with pytest.raises(ConfigError, match="expert_top_p"):
        ModelArgs.from_dict(config | {"expert_top_p": value})
