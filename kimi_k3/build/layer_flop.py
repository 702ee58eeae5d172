"""Floating-point operations of one token in one decoder layer, by formula.

A weight that a token meets is a product and a sum: 2 operations. What has no weights is
counted as the model computes it: attention of whole rows, the recurrence token by token,
mixes of residual blocks. Norms, gates and activations are left out: under 1 % together.
"""

from collections.abc import Iterable

from ..checkpoint.source_layout import SourceTensor
from ..config import TextArgs

ATTENTION, EXPERTS, OTHER, RECORDING = "attention", "experts", "other", "recording"

#: The parts that :func:`layer_flop` has.
PARTS: tuple[str, ...] = (ATTENTION, EXPERTS, OTHER, RECORDING)

#: Per entry of KDA's state: one product for the decay, and two operations each to
#: recall, to correct and to read.
STATE_OPERATIONS = 7

#: Per value of a candidate of a residual mix: a score, a sum of squares, a weighted sum.
MIX_OPERATIONS = 6


def layer_flop(
    text: TextArgs,
    layer: int,
    tensors: Iterable[SourceTensor],
    length: int,
    *,
    moments: bool = True,
) -> dict[str, int]:
    """Operations of a token in rows of ``length``, by part.

    ``tensors`` are those of 0-based ``layer``. "recording" is what a calibration adds
    to the experts: norms of their outputs and, with ``moments``, of what they read.
    """
    weights = {ATTENTION: 0, EXPERTS: 0, OTHER: 0}
    for tensor in tensors:
        if ".experts." in tensor.name:
            weights[EXPERTS] += tensor.parameters
        elif multiplies(tensor):
            part = ATTENTION if ".self_attn." in tensor.name else OTHER
            weights[part] += tensor.parameters
    experts, slots = text.experts_in_layer(layer), text.num_experts_per_token
    used = weights[EXPERTS] * slots // experts if experts else 0
    return {
        ATTENTION: 2 * weights[ATTENTION] + _attention(text, layer, length),
        EXPERTS: 2 * used,
        OTHER: 2 * weights[OTHER] + _mixes(text, layer),
        RECORDING: _recording(text, experts, moments),
    }


def multiplies(tensor: SourceTensor) -> bool:
    """A matrix, or the taps of a convolution; vectors and mixes are not."""
    return len(tensor.shape) > 1 and tensor.shape[0] > 1


def stored_blocks_before(text: TextArgs, layer: int) -> int:
    """Residual blocks that 0-based ``layer`` finds stored."""
    size = text.attn_res_block_size
    return 0 if size is None else -(-layer // size)


def stores_block(text: TextArgs, layer: int) -> bool:
    """Whether 0-based ``layer`` stores one more residual block."""
    size = text.attn_res_block_size
    return size is not None and layer % size == 0


def _attention(text: TextArgs, layer: int, length: int) -> int:
    """What attention does beside its weights."""
    if text.is_kda_layer(layer):
        linear = text.linear_attn_config
        return STATE_OPERATIONS * linear.num_heads * linear.head_dim**2
    # Keys that come later are masked, not left out.
    head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    return 2 * length * text.num_attention_heads * head


def _mixes(text: TextArgs, layer: int) -> int:
    """Before attention and before experts; the second finds a block just stored."""
    if text.attn_res_block_size is None:
        return 0
    before = stored_blocks_before(text, layer)
    after = before + stores_block(text, layer)
    candidates = (before + 1 if before else 0) + after + 1
    return MIX_OPERATIONS * candidates * text.hidden_size


def _recording(text: TextArgs, experts: int, moments: bool) -> int:
    if not experts:
        return 0
    slots, width = text.num_experts_per_token, text.expert_hidden_size
    norms = 2 * slots * width
    if not moments:
        return norms
    # Each token is weighed for all experts at once, what lies inside for its own.
    return norms + 2 * experts * width + 3 * slots * text.moe_intermediate_size
