"""Options of mlx-lm's commands that cannot serve Kimi K3, refused before they start.

mlx-lm finds out late, or never: with a draft model its server starts and then drops
every connection, a group size that does not divide the cache fails when a conversation
reaches ``--quantized-kv-start``, and ``--max-kv-size`` is ignored without a word.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from .config import TextArgs
from .config.quantization import MODES
from .errors import KimiK3Error

#: mlx-lm's default of ``--kv-group-size``.
DEFAULT_GROUP_SIZE = 64

BITS, GROUP_SIZES = MODES["affine"]

DRAFT_MODEL = (
    "--draft-model cannot speed up Kimi K3: guessed tokens that turn out wrong have to "
    "be taken back, and the state of its KDA layers cannot be. Leave --draft-model out."
)
CHAT_TEMPLATE = (
    "--chat-template cannot change how Kimi K3's conversations are rendered: they have "
    'no Jinja template. Leave it out; --chat-template-args \'{"thinking_effort": '
    '"low"}\' sets what its format knows.'
)
MAX_KV_SIZE = (
    "--max-kv-size does nothing for Kimi K3: its KDA layers keep a state of fixed size, "
    "and its MLA layers need every token. Leave it out and bound the conversation; "
    "--kv-bits 8 halves what the MLA layers keep."
)

#: Options looked at → the commands of mlx-lm that have them.
OPTIONS = {
    "--draft-model": ("generate", "server"),
    "--chat-template": ("server",),
    "--max-kv-size": ("generate", "chat", "cache_prompt"),
    "--kv-bits": ("generate", "server", "cache_prompt"),
    "--kv-group-size": ("generate", "server", "cache_prompt"),
}


def check_options(
    module: str, arguments: Sequence[str], text_args: Callable[[], TextArgs]
) -> None:
    """Refuse options of ``module`` (``mlx_lm.server`` …) that cannot work with a K3.

    ``text_args`` gives the config of the checkpoint, where it is needed. What mlx-lm
    itself refuses, as a word where it wants a number, is left to it. Raises KimiK3Error
    naming option, reason and way out.
    """
    given = _given(*_command(module, arguments))
    if given.get("draft_model"):
        raise KimiK3Error(DRAFT_MODEL)
    if given.get("chat_template"):
        raise KimiK3Error(CHAT_TEMPLATE)
    if given.get("max_kv_size"):
        raise KimiK3Error(MAX_KV_SIZE)
    if bits := given.get("kv_bits"):
        group_size = given.get("kv_group_size") or str(DEFAULT_GROUP_SIZE)
        if bits.isdigit() and group_size.isdigit():
            _check_quantised_cache(int(bits), int(group_size), text_args())


def _check_quantised_cache(bits: int, group_size: int, args: TextArgs) -> None:
    if bits not in BITS:
        raise KimiK3Error(
            f"--kv-bits {bits} is no width that MLX quantises to; choose one of "
            f"{_listed(BITS)}, or leave it out."
        )
    widths = (args.kv_lora_rank, args.qk_rope_head_dim)
    if group_size in GROUP_SIZES and all(width % group_size == 0 for width in widths):
        return
    fitting = [
        size for size in GROUP_SIZES if all(width % size == 0 for width in widths)
    ]
    way_out = (
        f"Choose --kv-group-size {_listed(fitting)}."
        if fitting
        else "No group size of MLX does; leave --kv-bits out."
    )
    raise KimiK3Error(
        f"--kv-group-size {group_size} does not divide what this model caches of a "
        f"token: {widths[0]} and {widths[1]} numbers an MLA layer. {way_out}"
    )


def _command(module: str, arguments: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The command of mlx-lm that runs, and what it is given; "" for other hosts."""
    host, _, command = module.partition(".")
    if host != "mlx_lm":
        return "", ()
    if command in ("", "__main__", "cli"):
        return (arguments[0], arguments[1:]) if arguments else ("", ())
    return command, arguments


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def _given(command: str, arguments: Sequence[str]) -> dict[str, str]:
    """Values of those :data:`OPTIONS` that ``command`` has; none if they are not whole.

    Read as the command reads them: abbreviated, or with ``=``.
    """
    parser = _Parser(add_help=False, exit_on_error=False)
    for option, commands in OPTIONS.items():
        if command in commands:
            parser.add_argument(option)
    try:
        known, _ = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return {}
    found: dict[str, Any] = vars(known)
    return {name: value for name, value in found.items() if value is not None}


def _listed(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} or {last}" if first else last
