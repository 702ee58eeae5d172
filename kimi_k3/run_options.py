"""Options of mlx-lm's commands that cannot serve Kimi K3, refused before they start.

mlx-lm finds out late, or never: with a draft model its server starts and then drops
every connection, a group size that does not divide the cache fails when a conversation
reaches ``--quantized-kv-start``, an effort that does not exist fails with every request,
and ``--max-kv-size`` is ignored without a word.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from .config import TextArgs
from .config.quantization import MODES
from .errors import ChatError, KimiK3Error
from .machine.sequence_memory import cached_widths
from .tokenizer.options import ChatOptions, chat_options
from .tokenizer.xtml import render

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
    "and its MLA layers need every token. Leave it out, and keep the conversation short "
    "enough for the memory."
)

#: Options looked at → the commands of mlx-lm that have them.
OPTIONS = {
    "--draft-model": ("generate", "server"),
    "--chat-template": ("server",),
    "--chat-template-args": ("server", "evaluate"),
    "--chat-template-config": ("generate",),
    "--max-kv-size": ("generate", "chat", "cache_prompt"),
    "--kv-bits": ("generate", "server", "cache_prompt"),
    "--kv-group-size": ("generate", "server", "cache_prompt"),
}

#: Commands that start without ``--model`` → what mlx-lm then does.
WITHOUT_MODEL = {
    "server": "starts without a model, and the requests for default_model fail",
    "generate": "takes a model of its own from the hub, which is no Kimi K3",
    "chat": "takes a model of its own from the hub, which is no Kimi K3",
}

#: Names of options in JSON: those of the format, and the other models' and OpenAI's.
CHAT_NAMES = (
    *(field.name for field in fields(ChatOptions)),
    "enable_thinking",
    "reasoning_effort",
)

#: Command → what it passes to the chat format itself; twice is a TypeError.
PASSED = {
    "server": ("tools", "add_generation_prompt"),
    "generate": ("add_generation_prompt", "continue_final_message"),
    "evaluate": ("add_generation_prompt", "continue_final_message"),
}

#: What a request may bring along, for options that need tools.
_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def check_model_named(
    module: str, arguments: Sequence[str], checkpoints: Sequence[str]
) -> None:
    """Refuse a command that would start without any of the ``checkpoints`` named.

    Raises KimiK3Error; asking for ``--help`` is no start.
    """
    command, rest = _command(module, arguments)
    if checkpoints or command not in WITHOUT_MODEL or {"-h", "--help"} & {*rest}:
        return
    raise KimiK3Error(
        f"no --model is given: mlx_lm.{command} {WITHOUT_MODEL[command]}. Add --model "
        "FOLDER with the absolute path of a build."
    )


def check_options(
    module: str, arguments: Sequence[str], text_args: Callable[[], TextArgs]
) -> None:
    """Refuse options of ``module`` (``mlx_lm.server`` …) that cannot work with a K3.

    ``text_args`` gives the config of the checkpoint, where it is needed. What mlx-lm
    itself refuses, as a word where it wants a number, is left to it. Raises KimiK3Error
    naming option, reason and way out.
    """
    command, rest = _command(module, arguments)
    given = _given(command, rest)
    if given.get("draft_model"):
        raise KimiK3Error(DRAFT_MODEL)
    if given.get("chat_template"):
        raise KimiK3Error(CHAT_TEMPLATE)
    if given.get("max_kv_size"):
        raise KimiK3Error(MAX_KV_SIZE)
    for option in ("--chat-template-args", "--chat-template-config"):
        text = given.get(option.removeprefix("--").replace("-", "_"))
        if text is not None:
            _check_chat_arguments(command, option, text)
    if bits := given.get("kv_bits"):
        group_size = given.get("kv_group_size") or str(DEFAULT_GROUP_SIZE)
        if bits.isdigit() and group_size.isdigit():
            _check_quantised_cache(int(bits), int(group_size), text_args())


def _check_chat_arguments(command: str, option: str, text: str) -> None:
    """Render as ``command`` would with the JSON in ``text``, the value of ``option``."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise KimiK3Error(
            f"{option} is no JSON ({error}). Write it in single quotes for the shell: "
            f'{option} \'{{"reasoning_effort": "high"}}\'.'
        ) from None
    if not isinstance(values, dict):
        raise KimiK3Error(
            f"{option} is {text}, which is no JSON object; write names and values: "
            f'{option} \'{{"reasoning_effort": "high"}}\'.'
        )
    passed = PASSED[command]
    known = [name for name in CHAT_NAMES if name not in passed]
    for name in values:
        if name in passed:
            raise KimiK3Error(
                f"{option} has {name}, which mlx_lm.{command} passes itself; leave it "
                "out."
            )
        if name not in known:
            raise KimiK3Error(
                f"{option} has {name!r}, which Kimi K3's chat format does not know; it "
                f"knows {', '.join(known)}."
            )
    own: dict[str, Any] = {"add_generation_prompt": True}
    if command == "server":
        own["tools"] = _TOOLS
    try:
        render([{"role": "user", "content": "x"}], chat_options(**own, **values))
    except ChatError as error:
        raise KimiK3Error(f"{option}: {error}") from None


def _check_quantised_cache(bits: int, group_size: int, args: TextArgs) -> None:
    if bits not in BITS:
        raise KimiK3Error(
            f"--kv-bits {bits} is no width that MLX quantises to; choose one of "
            f"{_listed(BITS)}, or leave it out."
        )
    widths = cached_widths(args)
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
