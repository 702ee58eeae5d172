"""Load a checkpoint as a user does, and watch a forward pass from outside."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

import kimi_k3

# Our class also where this Python ignores the start-up file of the installation.
kimi_k3.register()

Note = Callable[[tuple, Any], None]

#: What the one warning about a router that is stored quantised says.
ROUTER_WARNING = "router"


def load_stored(folder: Path) -> Any:
    """The model of ``folder`` through mlx-lm's loader, in the dtypes it is stored in.

    The one warning that a build may give is the one about its quantised router.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = load_model(folder)
    said = [str(warning.message) for warning in caught]
    assert len(said) <= 1, said
    assert all(ROUTER_WARNING in text for text in said), said
    assert type(model).__module__ == "kimi_k3.models.kimi_k3"
    return model


def load_float32(folder: Path) -> Any:
    """As :func:`load_stored`, then everything but packed weights in float32."""
    model = load_stored(folder)
    model.set_dtype(mx.float32)
    return model


class Recorder:
    """Stands in for a module or a function and shows ``note`` each call."""

    def __init__(self, inner: Any, note: Note):
        self.inner = inner
        self.note = note

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        self.note(args, out)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Watch:
    """Recorders put into a model, and what they saw under the golden files' names."""

    def __init__(self, model: Any):
        self.text = model.model
        self.layers = list(model.model.layers)
        self.seen: dict[str, Any] = {}
        self.originals: list[tuple[Any, str, Any]] = []
        for i, layer in enumerate(self.layers):
            self._watch_layer(f"layers.{i}.", layer)
            self.text.layers[i] = Recorder(layer, self._layer(f"layers.{i}.out"))
        self._put(self.text, "norm", self._norm)

    def restore(self) -> None:
        self.text.layers[:] = self.layers
        for module, attribute, original in reversed(self.originals):
            setattr(module, attribute, original)
            if attribute == "route":  # a method again, not an attribute
                delattr(module, attribute)

    def _watch_layer(self, at: str, layer: Any) -> None:
        self._put(layer, "input_layernorm", self._input(f"{at}attn_in"))
        self._put(layer, "self_attn", self._output(f"{at}attn_out"))
        self._put(layer, "post_attention_layernorm", self._input(f"{at}mlp_in"))
        if hasattr(layer.mlp, "route"):
            self._put(layer.mlp, "route", self._output(f"{at}routing"))
        self._put(layer, "mlp", self._output(f"{at}mlp_out"))

    def _put(self, module: Any, attribute: str, note: Note) -> None:
        original = getattr(module, attribute)
        self.originals.append((module, attribute, original))
        setattr(module, attribute, Recorder(original, note))

    def _input(self, name: str) -> Note:
        return lambda args, out: self.seen.update({name: args[0]})

    def _output(self, name: str) -> Note:
        return lambda args, out: self.seen.update({name: out})

    def _layer(self, name: str) -> Note:
        def note(args: tuple, out: Any) -> None:
            self.seen[name] = out
            if args[1].blocks is not None:
                self.seen["block_residual"] = mx.moveaxis(args[1].blocks, 0, 2)

        return note

    def _norm(self, args: tuple, out: Any) -> None:
        self.seen |= {"output_res_out": args[0], "final_hidden": out}


@contextmanager
def recorded(model: Any) -> Iterator[dict[str, Any]]:
    """A dictionary that a forward pass fills, under the golden files' names.

    Per layer attn_in, attn_out, mlp_in, mlp_out, out (B, T, h) and routing (expert ids
    and weights, in the router's own order); block_residual (B, T, n, h), output_res_out
    and final_hidden. The model is as before when the block ends.
    """
    watch = Watch(model)
    try:
        yield watch.seen
    finally:
        watch.restore()
