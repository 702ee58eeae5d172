"""Tokenizer folders for tests: TK beside a config, changed where a test wants it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_k3.nano.tokenizer_files import TokenIds, write_tokenizer
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

#: Modules as checkpoints bring them; running one leaves a mark.
TRAPS = {
    "configuration_kimi.py": """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PreTrainedConfig

class KimiConfig(PreTrainedConfig):
    model_type = {model_type!r}
""",
    "tokenization_kimi.py": """
from pathlib import Path
Path({mark!r}).touch()
from transformers import PreTrainedTokenizer

class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_size = 1
    def get_vocab(self): return {{"remote": 0}}
    def _convert_token_to_id(self, token): return 0
    def _convert_id_to_token(self, index): return "remote"
    def _tokenize(self, text, **kwargs): return ["remote"]
""",
}


def write_tk(
    folder: Path, model_type: str = "kimi_k3", **config: Any
) -> tuple[Path, TokenIds]:
    """TK in ``folder`` beside a config.json with ``config``; folder and ids."""
    ids = write_tokenizer(folder)
    write_json(folder / "config.json", {"model_type": model_type, **config})
    return folder, ids


def load_tk(folder: Path) -> TikTokenTokenizer:
    return TikTokenTokenizer.from_pretrained(write_tk(folder)[0])


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Let ``edit`` change the object in ``path`` in place."""
    value = json.loads(path.read_text(encoding="utf-8"))
    edit(value)
    write_json(path, value)


def set_traps(folder: Path) -> Path:
    """Let ``folder`` bring code for config and tokenizer; the file that running makes."""
    mark = folder.parent / f"{folder.name}-executed"
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    for name, code in TRAPS.items():
        code = code.format(mark=str(mark), model_type=model_type)
        (folder / name).write_text(code)
    brought = {"AutoConfig": "configuration_kimi.KimiConfig"}
    edit_json(folder / "config.json", lambda config: config.update(auto_map=brought))
    return mark
