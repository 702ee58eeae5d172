"""Load a Kimi K3 from Python: look at the folder first, then let mlx-lm load it."""

import inspect
from pathlib import Path
from typing import Any

from .checkpoint.folder import CONFIG, read_config
from .errors import CheckpointError, RegistrationError
from .folder_check import check_folder
from .registration import SWITCH, is_ours, register
from .tokenizer.files import check_tokenizer_folder


def load(
    path_or_hub_id: str | Path,
    *,
    lazy: bool = False,
    adapter_path: str | Path | None = None,
    model_config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    revision: str | None = None,
) -> tuple[Any, Any]:
    """A Kimi K3 model and its tokenizer, as ``mlx_lm.load`` returns them.

    Args:
        path_or_hub_id: a checkpoint folder, or a repository of the Hugging Face hub,
            which is downloaded (its config first, so another model is refused early).
        lazy: leave the weights on disk until they are needed.
        adapter_path: folder of LoRA adapters to apply.
        model_config: replaces values of ``config.json``.
        tokenizer_config: further arguments for the tokenizer.
        revision: branch, tag or commit of the repository.

    Raises:
        KimiK3Error: what is wrong with the folder, before anything large is read, or
            that our class is not the one that mlx-lm would use.

    No file of the checkpoint is ever executed.
    """
    if not register():
        raise RegistrationError(
            f"{SWITCH}=off is set, so mlx-lm would use its own class. Unset it, or call "
            "mlx_lm.load to do just that."
        )
    import mlx_lm

    folder = find_folder(path_or_hub_id, revision)
    check_folder(folder)
    check_tokenizer_folder(folder)
    options = {**(tokenizer_config or {}), "trust_remote_code": False}
    model, tokenizer, *_ = mlx_lm.load(
        str(folder),
        tokenizer_config=options,
        model_config=model_config,
        adapter_path=None if adapter_path is None else str(adapter_path),
        lazy=lazy,
        trust_remote_code=False,
    )
    found = inspect.getfile(type(model))
    if not is_ours(found):
        raise RegistrationError(
            f"mlx-lm loaded its own class from {found}; `kimi-k3 doctor` tells why."
        )
    if "eos_token" not in options:
        # A config may state ids of which none ends a turn of Kimi K3.
        tokenizer.eos_token_ids |= set(tokenizer.end_ids)
    return model, tokenizer


def find_folder(path_or_hub_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint; a hub repository is downloaded without its code.

    Raises CheckpointError if there is neither such a folder nor such a repository.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.exists():
        return path
    name = str(path_or_hub_id)
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or path.is_absolute():
        raise CheckpointError(
            f"{path} is not there. Name a checkpoint folder, or a hub repository as "
            "OWNER/NAME."
        )
    config_only = _download(name, revision, [CONFIG])
    read_config(config_only)
    from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

    wanted = [pattern for pattern in DEFAULT_ALLOW_PATTERNS if pattern != "*.py"]
    return _download(name, revision, wanted)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    # The one function of mlx-lm that knows its users' hubs; it has no public name.
    from mlx_lm.utils import _download as download

    try:
        return Path(download(name, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{name} is no folder here, and the hub does not give it: "
            f"{str(error).splitlines()[0]}. Name a folder, or check the repository's "
            "name and the connection."
        ) from error
