"""Classes of matrices that are quantised alike: all of one kind and name, in any layer.

Routed experts are no class: each has a width of its own. The router and everything that
is not a matrix keep the precision of the source.
"""

from collections.abc import Iterable, Iterator

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.names import PREFIX, layer_of
from ..checkpoint.stored_format import StoredFormat
from ..config import TextArgs
from ..errors import PlanError
from ..models import Model
from ..models.latent_moe import Router

#: Bits that a class can have; 16 is the source's bfloat16.
CLASS_BITS = (16, 8, 6, 5, 4, 3)

#: Group sizes of the affine format, the preferred one first.
_GROUPS = (64, 32)

#: MLA's absorbed halves of one matrix of the source have one width.
_KV_B = ("self_attn.embed_q", "self_attn.unembed_out")


def matrix_class(module: str, text: TextArgs) -> str:
    """The class of the matrix ``module``, a module path of the model.

    ``language_model.model.layers.5.self_attn.o_proj`` is of class ``kda.o_proj`` if layer
    5 is Kimi Delta Attention, of ``mla.o_proj`` if not; ``…mlp.shared_experts.up_proj`` of
    ``shared_experts.up_proj``; a dense layer's ``…mlp.up_proj`` of ``dense.up_proj``.
    """
    inside = module.removeprefix(PREFIX).removeprefix("model.")
    layer = layer_of(f".{inside}")
    if layer is None:
        return inside
    inside = inside.removeprefix(f"layers.{layer}.")
    if inside in _KV_B:
        return "mla.kv_b_proj"
    if inside.startswith("self_attn."):
        kind = "kda" if text.is_kda_layer(layer) else "mla"
        return f"{kind}.{inside.removeprefix('self_attn.')}"
    inside = inside.removeprefix("mlp.")
    return inside if text.is_moe_layer(layer) else f"dense.{inside}"


def class_matrices(model: Model) -> Iterator[tuple[str, str, nn.Module]]:
    """Class, path and module of every matrix of ``model`` that a plan can quantise."""
    text = model.args.text_config
    for path, module in model.named_modules():
        if is_class_matrix(path, module):
            yield matrix_class(path, text), path, module


def is_class_matrix(path: str, module: nn.Module) -> bool:
    """Whether a plan can quantise ``module`` with its class: no router, no expert."""
    quantisable = hasattr(module, "to_quantized") or "scales" in module
    return quantisable and not isinstance(module, Router) and ".switch_mlp" not in path


def refuse_unknown_classes(named: Iterable[str], known: Iterable[str]) -> None:
    """Raise PlanError if a class is named that is not among the ``known`` ones."""
    known = sorted(known)
    if unknown := sorted(set(named) - set(known)):
        raise PlanError(
            f"no class of matrices is called {unknown[0]!r}; there are {', '.join(known)}."
        )


def affine_format(bits: int, inputs: int) -> StoredFormat | None:
    """The affine format of ``bits`` for matrices of ``inputs`` columns.

    Groups of 64, or of 32 where 64 does not divide the columns. None for 16 bits, and
    for columns that neither divides: such a matrix stays as the source has it.
    """
    group = next((g for g in _GROUPS if inputs % g == 0), None)
    if bits == 16 or group is None:
        return None
    return StoredFormat("affine", bits, group)


def inputs_of(module: nn.Module) -> int:
    """Columns of a dense matrix module."""
    weight: mx.array = module["weight"]
    return weight.shape[-1]
