"""Memory and disk of a calibration, by formula.

Weights and hidden states are counted to the byte, as the code holds them at the worst
moment of a layer. What a step computes with is counted in bytes a value of the arrays
that MLX's CPU has alive at once, measured operation by operation; a GPU's fused kernels
need less. A test holds the sum against the peak that MLX reports.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from ..checkpoint.source_layout import SourceTensor
from ..config import TextArgs
from .expert_recorder import CHUNK_TOKENS, ExpertSums
from .layer_flop import multiplies, stored_blocks_before, stores_block

#: Bytes of a hidden state: the release's activations are bfloat16.
ITEM_BYTES = 2

#: KDA in chunks, bytes per channel of a token: some 28 float32 arrays of that size.
KDA_BYTES = 115

#: MLA, arrays of a row's scores (heads, length, length) that are alive at once, and
#: arrays of all heads' queries and values.
MLA_SCORES, MLA_HEADS = 2, 4

#: An MLP, bytes per inner channel of a token: gate, up and SiTU in float32.
MLP_BYTES = 22

#: Routed experts, bytes per pair of a token and an expert: per latent channel, per
#: inner channel, and per inner channel whose square is summed.
PAIR_LATENT_BYTES, PAIR_INNER_BYTES, PAIR_MOMENT_BYTES = 22, 16, 4

#: Router, bytes per expert of a token: logits, scores and choice in float32.
ROUTER_BYTES = 12

#: A mix of residual blocks, bytes per value of each candidate: float32 copies.
MIX_BYTES = 18

#: Names and headers of a checkpoint, bytes a tensor, and Python with its packages:
#: measured with the release's headers.
TENSOR_BYTES, PROCESS_BYTES = 1_500, 300_000_000

#: Moments, bytes per value: a float64 sum, what a step adds, what is written.
MOMENT_BYTES = 8 + 2 * 4 + 4


@dataclass(frozen=True)
class StateTraffic:
    """Hidden states of a whole pass under a memory limit, in bytes.

    Attributes:
        held: most that is held in memory at once.
        read, written: from and to the disk, of each layer.
    """

    held: int
    read: tuple[int, ...]
    written: tuple[int, ...]


def state_traffic(text: TextArgs, array: int, memory_limit: int) -> StateTraffic:
    """What :class:`~.hidden_states.HiddenStates` does with arrays of ``array`` bytes.

    Residual sums are held first; a block is held if it fits beside what is held when it
    is stored. A layer that holds the new sums lets go of the old ones row by row.
    """
    blocks_held, sums_held = 0, array <= memory_limit
    held, read, written = array * sums_held, [], []
    for layer in range(text.num_hidden_layers):
        spilled = stored_blocks_before(text, layer) - blocks_held + (not sums_held)
        sums_held = (blocks_held + 1) * array <= memory_limit
        fresh = 1
        if stores_block(text, layer):
            fresh = 2
            blocks_held += (blocks_held + sums_held + 1) * array <= memory_limit
        held = max(held, (blocks_held + sums_held) * array)
        read.append(spilled * array)
        written.append(fresh * array)
    return StateTraffic(held, tuple(read), tuple(written))


def step_memory(
    text: TextArgs, layer: int, rows: int, length: int, *, moments: bool
) -> dict[str, int]:
    """What ``rows`` rows take while they go through ``layer``: bytes by part."""
    tokens, value = rows * length, text.hidden_size * ITEM_BYTES
    before = stored_blocks_before(text, layer)
    stack = before
    if stores_block(text, layer):
        stack += before + 1  # the longer stack is a copy
    reading = before * value  # read one by one, then stacked
    mixing = MIX_BYTES * (before + 2) * text.hidden_size if before else 0
    attending = 2 * value + _attention(text, layer, length)
    feeding = 3 * value + _feed_forward(text, layer, tokens, moments)
    if moments:
        feeding += value + _attention_output(text, layer) * ITEM_BYTES
    return {
        "rows of a step, their residual blocks": (stack + 2) * value * tokens,
        "activations of a step": max(reading + mixing, attending, feeding) * tokens,
    }


def moment_memory(text: TextArgs, layer: int) -> int:
    """Bytes of the moments of ``layer``'s experts, while they are summed and written."""
    return text.experts_in_layer(layer) * _expert_inputs(text) * MOMENT_BYTES


def partial_bytes(text: TextArgs, layer: int, corpora: int) -> int:
    """Disk of the sums of ``layer`` until the calibration is finished."""
    return len(fields(ExpertSums)) * 8 * corpora * text.experts_in_layer(layer)


def moment_bytes(
    text: TextArgs, layer: int, tensors: Iterable[SourceTensor], corpora: int
) -> int:
    """Disk of the moments of ``layer``, float32; ``tensors`` are its own."""
    inputs = 0
    for tensor in tensors:
        leaf = tensor.name.removesuffix(".weight").rpartition(".")[2]
        if ".experts." in tensor.name or leaf in _NOT_RECORDED:
            continue
        if multiplies(tensor):
            inputs += tensor.shape[-1]
        if leaf == "kv_b_proj":  # its key half meets each head's queries
            inputs += text.num_attention_heads * text.qk_nope_head_dim
    experts = text.experts_in_layer(layer) * _expert_inputs(text)
    return 4 * (corpora * inputs + experts)


#: No matrix that can be quantised, or joined with ``q_proj`` in a KDA layer.
_NOT_RECORDED = ("gate", "q_conv1d", "k_conv1d", "v_conv1d", "k_proj", "v_proj")


def _expert_inputs(text: TextArgs) -> int:
    return text.expert_hidden_size + text.moe_intermediate_size


def _attention_output(text: TextArgs, layer: int) -> int:
    """Width of what the output projection reads, which waits for its moments."""
    if text.is_kda_layer(layer):
        return text.linear_attn_config.projection_dim
    return text.num_attention_heads * text.v_head_dim


def _attention(text: TextArgs, layer: int, length: int) -> int:
    """Bytes a token."""
    if text.is_kda_layer(layer):
        return KDA_BYTES * text.linear_attn_config.projection_dim
    heads = text.num_attention_heads
    head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    scores = (MLA_SCORES * heads * ITEM_BYTES + 1) * length  # and a mask of one byte
    return scores + MLA_HEADS * heads * head * ITEM_BYTES


def _feed_forward(text: TextArgs, layer: int, tokens: int, moments: bool) -> int:
    """Bytes a token, of which experts run some at a time."""
    experts = text.experts_in_layer(layer)
    if not experts:
        return MLP_BYTES * text.intermediate_size
    inner = PAIR_INNER_BYTES + PAIR_MOMENT_BYTES * moments
    pair = PAIR_LATENT_BYTES * text.expert_hidden_size
    pair += inner * text.moe_intermediate_size
    chunk = min(tokens, CHUNK_TOKENS) * text.num_experts_per_token * pair
    per_token = ROUTER_BYTES * experts + ITEM_BYTES * text.expert_hidden_size
    return per_token + -(-chunk // tokens)
