"""A mix of a few kilobytes, and mixes that a test makes up."""

from pathlib import Path

from tokenizer_folders import edit_json, write_tk

from kimi_k3.build.mix import Mix
from kimi_k3.build.mix_file import parse_mix, read_mix

FOLDER = Path(__file__).parent / "data" / "samples"

#: Four corpora (code, english, chinese, traces), 2,048 tokens in rows of 128.
SMALL = FOLDER / "mix.toml"


def small_mix() -> Mix:
    return read_mix(SMALL)


def mix_of(
    base: Path, corpora: str, *, tokens: int = 256, length: int = 32, more: str = ""
) -> Mix:
    """A mix whose files lie in ``base``; ``corpora`` and ``more`` are TOML."""
    head = f"tokens = {tokens}\nlength = {length}\n{more}\n"
    return parse_mix(head + corpora, base=base, origin="mix.toml")


def other_names(folder: Path) -> Path:
    """A tokenizer of the same vocabulary that leaves one control id unnamed."""
    edit_json(
        write_tk(folder)[0] / "tokenizer_config.json",
        lambda config: config["added_tokens_decoder"].pop("338"),
    )
    return folder
