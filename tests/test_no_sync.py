"""On the GPU path a decode step never waits for the device.

The step is traced by ``mx.compile`` with the parameters and every array of the caches
as its inputs. Reading a traced array on the host raises, so a step that traces reads
none. Arrays that are no inputs (constants made by the code) can be read; they hold
nothing that a token or a checkpoint decides.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest
from loading import load_stored
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import BatchKVCache
from simulated import Launches, trace_kernels
from tiny_k3 import write_t2

from kimi_k3.models.expert_banks import TwoBankSwitchGLU
from kimi_k3.models.latent_moe import LatentMoE
from kimi_k3.models.mla import GatedMLA

#: Two rows of unequal length, so that the caches hold arrays of offsets and padding.
PROMPTS = ([7, 8, 9, 10, 11], [12, 13])

#: What MLX says to a read of a traced array.
REFUSED = "during function transformations|inside a graph transformation"


@pytest.fixture(scope="module", params=[None, 0.6], ids=["all experts", "top p"])
def model(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """T2: two banks in three of four expert layers, one bank in the fourth."""
    folder = tmp_path_factory.mktemp("two-banks")
    return load_stored(write_t2(folder, expert_top_p=request.param))


def single_caches(model: Any) -> list[Any]:
    """Caches of one sequence that holds a prompt."""
    caches = model.make_cache()
    mx.eval(model(mx.array(PROMPTS[:1]), cache=caches))
    return caches


def batch_caches(model: Any) -> list[Any]:
    """Caches of a batch made of two sequences, as mlx-lm's server makes them."""
    rows = []
    for prompt in PROMPTS:
        rows.append(model.make_cache())
        mx.eval(model(mx.array([prompt]), cache=rows[-1]))
    return [type(layer[0]).merge(list(layer)) for layer in zip(*rows, strict=True)]


CACHES: dict[str, Callable[[Any], list[Any]]] = {
    "one sequence": single_caches,
    "a batch": batch_caches,
}


@contextmanager
def kept(*holders: dict[str, Any]) -> Iterator[None]:
    """Put every array in ``holders`` back afterwards: tracing leaves tracers there."""
    copies = [tree_map(lambda leaf: leaf, dict(holder)) for holder in holders]
    try:
        yield
    finally:
        for holder, copy in zip(holders, copies, strict=True):
            _put_back(holder, copy)


def _put_back(holder: Any, copy: Any) -> None:
    for key in list(holder) if isinstance(holder, dict) else range(len(holder)):
        if isinstance(copy[key], dict | list):
            _put_back(holder[key], copy[key])
        else:
            holder[key] = copy[key]


def trace_step(model: Any, caches: list[Any], tokens: mx.array) -> Launches:
    """Trace one decode step of ``tokens`` (B, 1); reads of the host raise ValueError."""
    held = [vars(cache) for cache in caches]

    def step(tokens: mx.array) -> mx.array:
        return model(tokens, cache=caches)

    with kept(model.state, *held), trace_kernels() as launches:
        logits = mx.compile(step, inputs=[model.state, held])(tokens)
    assert logits.shape == (len(tokens), 1, model.args.text_config.vocab_size)
    return launches


def arrays(tree: Any) -> dict[str, np.ndarray]:
    flat: list[tuple[str, Any]] = tree_flatten(tree)  # type: ignore
    return {
        name: np.array(value.astype(mx.float32))
        for name, value in flat
        if isinstance(value, mx.array)
    }


@pytest.mark.parametrize("kind", list(CACHES))
def test_a_decode_step_reads_nothing_on_the_host(model: Any, kind: str):
    caches = CACHES[kind](model)
    held = [vars(cache) for cache in caches]
    before = arrays([model.state, held])
    rows = 1 if kind == "one sequence" else len(PROMPTS)

    launches = trace_step(model, caches, mx.full((rows, 1), 5))

    assert launches.records, "no kernel was launched: this was not the GPU path"
    after = arrays([model.state, held])
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)


def read_before(owner: type, method: str, read: Callable[..., Any]) -> Any:
    """A patch that reads something on the host before each call of a method."""
    original = getattr(owner, method)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        read(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return mock.patch.object(owner, method, call)


def read_activation(_: Any, x: mx.array, *__: Any) -> None:
    x.max().item()


def read_offset(_: Any, x: mx.array, mask: Any, cache: Any) -> None:
    assert isinstance(cache, BatchKVCache)
    cache.offset.max().item()


def read_bank_table(self: Any, x: mx.array, ids: mx.array, *_: Any) -> None:
    self.bank_table[0].item()


def read_ids(self: Any, x: mx.array, ids: mx.array, *_: Any) -> None:
    np.array(ids)


PLANTED = {
    "an activation": (LatentMoE, "__call__", read_activation),
    "a cache offset": (GatedMLA, "__call__", read_offset),
    "a bank table": (TwoBankSwitchGLU, "combine", read_bank_table),
    "the expert ids": (TwoBankSwitchGLU, "combine", read_ids),
}


@pytest.mark.parametrize("what", list(PLANTED))
def test_a_planted_host_read_is_caught(model: Any, what: str):
    caches = batch_caches(model)
    banks = [
        layer.mlp.switch_mlp
        for layer in model.layers
        if isinstance(getattr(layer.mlp, "switch_mlp", None), TwoBankSwitchGLU)
    ]
    assert banks
    for bank in banks:
        bank.bank_table = mx.array([bank.split])
    try:
        with (
            read_before(*PLANTED[what]),
            pytest.raises((ValueError, RuntimeError), match=REFUSED),
        ):
            trace_step(model, caches, mx.full((len(PROMPTS), 1), 5))
    finally:
        for bank in banks:
            del bank.bank_table
    # Nothing of the trace is left behind, even though it broke off.
    logits = model(mx.full((len(PROMPTS), 1), 5), cache=caches)
    assert mx.isfinite(logits).all().item()
