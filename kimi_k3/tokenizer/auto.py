"""How transformers' AutoTokenizer finds our tokenizer, and only for Kimi K3.

AutoTokenizer takes a class that is registered under a checkpoint's ``tokenizer_class``
before any file of the checkpoint, whatever ``trust_remote_code`` says. K3's class name
is Kimi-K2's too. So what stays registered is a config class for ``kimi_k3``: when
AutoTokenizer reads a K3 config, that class puts the tokenizer's name in place, and the
tokenizer takes it back once it is loaded.
"""

import threading
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

from .files import CLASS_NAME

MODEL_TYPE = "kimi_k3"

# Threads between reading a K3 config and having its tokenizer. The name stays in place
# while there is one: without it, transformers would turn to the checkpoint's own files.
_waiting: set[int] = set()
_lock = threading.Lock()

_HUB_OPTIONS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")


# The name must be none of transformers' own config classes: a class it knows would make
# it prefer the checkpoint's code under trust_remote_code=True.
class KimiK3MlxConfig(PreTrainedConfig):
    """What transformers knows of a K3 config: the values as they stand in the file."""

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        offer()
        return super().from_dict(config_dict, **kwargs)


def register_tokenizer() -> None:
    """Make ``AutoTokenizer`` give our class for ``model_type: kimi_k3``; idempotent."""
    AutoConfig.register(MODEL_TYPE, KimiK3MlxConfig, exist_ok=True)


def offer() -> None:
    """Put our class under its name for the tokenizer that this thread loads next."""
    from .tokenizer import TikTokenTokenizer

    with _lock:
        _waiting.add(threading.get_ident())
        REGISTERED_TOKENIZER_CLASSES[CLASS_NAME] = TikTokenTokenizer


def withdraw() -> None:
    """Take the name back, unless another thread still waits for its tokenizer."""
    with _lock:
        _waiting.discard(threading.get_ident())
        if not _waiting:
            REGISTERED_TOKENIZER_CLASSES.pop(CLASS_NAME, None)


def model_type(name_or_path: str | Path, **kwargs: Any) -> str | None:
    """``model_type`` of a checkpoint's config; None if it has none that can be read."""
    options = {key: kwargs[key] for key in _HUB_OPTIONS if key in kwargs}
    try:
        config, _ = PreTrainedConfig.get_config_dict(name_or_path, **options)
    except (OSError, ValueError):
        return None
    return config.get("model_type")


def load_as_if_absent(name_or_path: str | Path, *args: Any, **kwargs: Any) -> Any:
    """What AutoTokenizer gives for a checkpoint of another model, without our class.

    Reached only if a K3 config was read and its tokenizer never loaded. Whether the
    caller trusts remote code is not known here, so transformers asks, or refuses.
    """
    with _lock:
        _waiting.clear()
        REGISTERED_TOKENIZER_CLASSES.pop(CLASS_NAME, None)
    kwargs.pop("_from_auto", None)
    kwargs.pop("_commit_hash", None)
    return AutoTokenizer.from_pretrained(name_or_path, *args, **kwargs)
