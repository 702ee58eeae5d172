"""What a conversation takes beside the weights, in bytes counted from the config.

MLA layers keep a latent of every token; KDA layers keep a state of fixed size.
"""

from dataclasses import dataclass

from ..config import TextArgs
from ..errors import KimiK3Error

#: mlx-lm's KV caches grow by this many tokens at a time.
CACHE_STEP = 256

#: Bytes of a recurrent state's numbers, always float32.
STATE_SIZE = 4


@dataclass(frozen=True)
class QuantisedCache:
    """mlx-lm's ``--kv-bits`` and ``--kv-group-size``: affine groups."""

    bits: int
    group_size: int = 64

    def nbytes(self, numbers: int, size: int) -> int:
        """``numbers`` of a token: codes, and a scale and bias of ``size`` bytes a group.

        Raises KimiK3Error if groups do not divide them.
        """
        if numbers % self.group_size:
            raise KimiK3Error(
                f"--kv-group-size {self.group_size} does not divide the {numbers} "
                "numbers that an MLA layer keeps of a token; choose one that does."
            )
        return numbers * self.bits // 8 + numbers // self.group_size * 2 * size


def cached_widths(args: TextArgs) -> tuple[int, int]:
    """Numbers that an MLA layer keeps of a token: its latent, and the shared key part."""
    return args.kv_lora_rank, args.qk_rope_head_dim


def token_bytes(
    args: TextArgs, *, size: int = 2, quantised: QuantisedCache | None = None
) -> int:
    """Bytes that all MLA layers keep of one token; ``size`` is that of a number."""
    per_layer = 0
    for numbers in cached_widths(args):
        per_layer += quantised.nbytes(numbers, size) if quantised else numbers * size
    return per_layer * len(args.linear_attn_config.full_attn_layers)


def latents_bytes(
    args: TextArgs,
    tokens: int,
    *,
    size: int = 2,
    quantised: QuantisedCache | None = None,
) -> int:
    """At most what the MLA layers keep of a conversation of ``tokens`` tokens.

    A cache has room for up to a step more than it holds.
    """
    room = tokens + CACHE_STEP - 1 if tokens else 0
    return room * token_bytes(args, size=size, quantised=quantised)


def state_bytes(args: TextArgs, *, size: int = 2) -> int:
    """Exactly what the KDA layers keep of a conversation of any length."""
    linear = args.linear_attn_config
    recurrent = linear.num_heads * linear.head_dim**2 * STATE_SIZE
    inputs = (linear.short_conv_kernel_size - 1) * 3 * linear.projection_dim * size
    return len(linear.kda_layers) * (recurrent + inputs)
