"""Whether every stored tensor has the shape that ``config.json`` makes it."""

import mlx.core as mx

from ..config import TextArgs
from ..errors import CheckpointError
from .names import Placement, biases_name, scales_name
from .stored_format import PACKED, StoredFormat

Weights = dict[str, mx.array]
Shapes = dict[str, tuple[int, ...]]

_FLOATS = (mx.bfloat16, mx.float16, mx.float32)


def check_shapes(
    weights: Weights, placements: dict[str, Placement], args: TextArgs, shapes: Shapes
) -> None:
    """Raise CheckpointError naming the first tensor that does not fit.

    Whole tensors and parts, dense and packed; tensors that the model does not have are
    the business of the completeness check.
    """
    seen: set[tuple] = set()
    for name, placement in placements.items():
        tensor = weights[name]
        part = placement.part is not None
        scales = biases = None
        if placement.key.endswith(".weight"):
            scales, biases = (
                weights.get(scales_name(name)),
                weights.get(biases_name(name)),
            )
        alike = (placement.key, part, *map(_look, (tensor, scales, biases)))
        if alike in seen:
            continue
        seen.add(alike)
        wanted = dense_shape(placement, args, shapes)
        if wanted is None:
            continue
        if tensor.dtype in PACKED or not placement.key.endswith(".weight"):
            _check_packed(name, placement, tensor, wanted)
        else:
            _check_dense(name, tensor, wanted)
        if scales is not None:
            _check_scales(name, tensor, scales, biases, wanted)


def dense_shape(
    placement: Placement, args: TextArgs, shapes: Shapes
) -> tuple[int, ...] | None:
    """Shape, if it were dense, of the matrix that a stored tensor belongs to.

    None for what is not a parameter of the model.
    """
    base, _, suffix = placement.key.rpartition(".")
    if suffix not in ("weight", "scales", "biases"):
        return shapes.get(placement.key)
    if base.endswith(".self_attn.kv_b_proj"):
        rows = args.num_attention_heads * (args.qk_nope_head_dim + args.v_head_dim)
        return rows, args.kv_lora_rank
    shape = shapes.get(f"{base}.weight")
    if shape is None or placement.part is None:
        return shape
    if ".switch_mlp." in base:
        return shape[1:]
    return shape[0] // 3, *shape[1:]


def _look(tensor: mx.array | None) -> tuple | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)


def _check_dense(name: str, tensor: mx.array, wanted: tuple[int, ...]) -> None:
    if tensor.dtype not in _FLOATS:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}; wanted bfloat16, float16 or float32."
        )
    shape = tuple(tensor.shape)
    if name.endswith(("_conv.conv.weight", "_conv1d.weight")):
        # (channels, 1, width) in the source, (channels, width, 1) in MLX.
        fits = shape in (wanted, (wanted[0], wanted[2], wanted[1]))
    else:
        fits = shape == wanted
    if not fits:
        raise _misfit(name, shape, wanted)


def _check_packed(
    name: str, placement: Placement, tensor: mx.array, wanted: tuple[int, ...]
) -> None:
    """Codes, scales and biases by rows; other tensors that are not ``.weight`` whole."""
    suffix = placement.key.rpartition(".")[2]
    shape = tuple(tensor.shape)
    if suffix in ("A_log", "dt_bias"):
        return  # flattened, and cut to the heads
    if suffix not in ("weight", "scales", "biases"):
        _check_dense(name, tensor, wanted)
    elif tensor.dtype == mx.uint8 and suffix == "weight" and placement.part is None:
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}; packed weights are uint32 words in MLX's "
            "formats."
        )
    elif suffix != "weight" and tensor.dtype not in (*_FLOATS, mx.uint8):
        raise CheckpointError(
            f"{name} is stored as {tensor.dtype}; scales and biases are floating-point "
            "numbers or, as scales of MXFP4, bytes."
        )
    elif shape[:-1] != wanted[:-1]:
        raise _misfit(name, shape, (*wanted[:-1], -1))


def _check_scales(
    name: str,
    tensor: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    wanted: tuple[int, ...],
) -> None:
    if tensor.dtype not in PACKED:
        raise CheckpointError(
            f"{name} is {tensor.dtype} and has scales beside it; packed codes are "
            "integers. The folder mixes shards of two builds."
        )
    if tuple(scales.shape[:-1]) != wanted[:-1]:
        raise _misfit(scales_name(name), tuple(scales.shape), (*wanted[:-1], -1))
    stored = StoredFormat.of_tensors(name, tensor, scales, wanted[-1])
    if biases is not None and (stored.mode != "affine" or biases.shape != scales.shape):
        raise CheckpointError(
            f"{biases_name(name)} has shape {tuple(biases.shape)} beside {stored} scales "
            f"of shape {tuple(scales.shape)}; only affine formats have biases, one for "
            "each scale."
        )


def _misfit(
    name: str, shape: tuple[int, ...], wanted: tuple[int, ...]
) -> CheckpointError:
    text = ", ".join("…" if size == -1 else str(size) for size in wanted)
    return CheckpointError(
        f"{name} has shape {shape}, but config.json makes it ({text}). Config and shards "
        "are of different models; download both again from one place."
    )
