"""Runs a stock command of mlx-lm or mlx-vlm with our class and a checked checkpoint.

The second door, for Pythons that ignore start-up files: register, look through the
checkpoint folders named among the arguments and through the options that a K3 cannot
serve, then do what the command itself does.
"""

import runpy
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import zip_longest

from .errors import KimiK3Error, RegistrationError
from .registration import SWITCH, check_host, register

HOSTS = ("mlx_lm", "mlx_vlm")

#: Options of the hosts' commands whose value is the checkpoint to read.
CHECKPOINT_OPTIONS = ("--model", "-m", "--hf-path", "--path")


def run_host(module: str, arguments: Sequence[str]) -> object:
    """Run ``module`` of a host as its command or ``python -m`` would.

    Returns what the command hands to ``sys.exit`` (None: all went well); a SystemExit
    of its own passes through. Raises :class:`~kimi_k3.errors.KimiK3Error` before
    anything runs if the module is not a host's, our class cannot be registered, a
    checkpoint among the arguments is not there, damaged or wants to run its own code,
    none is named where one is needed, or an option cannot work with Kimi K3. A hub
    repository is downloaded first, as the command itself would.
    """
    prepare(module)
    # Imports mlx-lm, which prepare() has just found fit.
    from .folder_check import check_folder
    from .loading import find_folder
    from .run_options import check_model_named, check_options
    from .tokenizer.files import check_tokenizer_folder

    checkpoints = named_checkpoints(arguments)
    check_model_named(module, arguments, checkpoints)
    for checkpoint in checkpoints:
        folder = find_folder(checkpoint)
        report = check_folder(folder)
        check_tokenizer_folder(folder)
        check_options(module, arguments, lambda r=report: r.folder.args.text_config)
    before = sys.argv
    sys.argv = [module, *arguments]
    try:
        # The installed command is the module without mlx-lm's advice against -m.
        commands = tuple(entry_points(group="console_scripts", name=module))
        if commands:
            return commands[0].load()()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return None
    finally:
        sys.argv = before


def prepare(module: str) -> None:
    """Register our class for ``module``, which must be one of mlx-lm or mlx-vlm."""
    host = module.partition(".")[0]
    if host not in HOSTS:
        raise KimiK3Error(
            f"kimi-k3 run takes a module of mlx_lm or mlx_vlm, not {module!r}; for "
            "example: kimi-k3 run mlx_lm.generate --model FOLDER --prompt hello"
        )
    check_host(host)
    if not register():
        raise RegistrationError(
            f"{SWITCH}=off is set, so {module} would run with the host's own class. "
            f"Unset it, or run `python -m {module}` to do just that."
        )
    if _find_module(module) is None:
        raise KimiK3Error(
            f"{host} has no module {module}; `kimi-k3 run mlx_lm --help` lists the "
            "commands of mlx-lm."
        )


def _find_module(module: str) -> object:
    try:
        return find_spec(module)
    except ModuleNotFoundError as error:
        # A parent that is not there; any other missing module is the host's own trouble.
        if error.name and module.startswith(error.name):
            return None
        raise


def named_checkpoints(arguments: Sequence[str]) -> list[str]:
    """What ``arguments`` name as checkpoints to read: folders or hub repositories.

    Knows ``--model X``, ``--model=X`` and the short forms that argparse accepts. Raises
    KimiK3Error for an empty name, as an unset variable of a shell gives it.
    """
    named = []
    for option, following in zip_longest(arguments, arguments[1:]):
        name, equals, value = option.partition("=")
        if not equals:
            value = following
        if value is None or not _reads_checkpoint(name):
            continue
        if not value.strip():
            raise KimiK3Error(
                f"{name} is empty; name a checkpoint folder, or a hub repository as "
                "OWNER/NAME. Is the variable set that it comes from?"
            )
        # For some commands -m is a number of tokens.
        if not (name == "-m" and value.isdigit()):
            named.append(value)
    return named


def _reads_checkpoint(option: str) -> bool:
    if option in CHECKPOINT_OPTIONS:
        return True
    abbreviated = option.startswith("--") and len(option) > 2
    return abbreviated and any(known.startswith(option) for known in CHECKPOINT_OPTIONS)
