"""Files beside the shards: which ones a build gets, and what is in them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_k3 import write_tk

from kimi_k3.conversion.side_files import (
    GENERATION,
    end_ids,
    left_out,
    read_side_files,
    side_files,
)
from kimi_k3.errors import ConversionError, KimiK3Error, TokenizerError
from kimi_k3.nano import NANO_FOLDER

#: Names of the ids that end a turn, as TK has them.
ENDS = ("<|end_of_msg|>", "[EOS]")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = write_tk(tmp_path / "source")
    (folder / "config.json").write_text('{"eos_token_id": 7}')
    return folder


def write_side_files(source: Path, out: Path) -> list[str]:
    content = read_side_files(source)
    for name, written in content.items():
        (out / name).write_bytes(written)
    return list(content)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def ids_of(folder: Path) -> list[int]:
    named = json.loads((folder / "tokenizer_config.json").read_text())
    by_name = {e["content"]: int(i) for i, e in named["added_tokens_decoder"].items()}
    return [by_name[name] for name in ENDS]


def generation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / GENERATION).read_text())


COPIED = (
    "LICENSE",
    "LICENSE.md",
    "THIRD_PARTY_NOTICES.md",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tiktoken.model",
)

LEFT = (
    "README.md",
    "notes.txt",
    "secrets.json",
    "LICENSE_keys.json",
    ".gitattributes",
    ".hidden.json",
    "config.json",
    "configuration_kimi_k3.py",
    "model-00001-of-000002.safetensors",
    "model.safetensors.index.json",
    "figure.png",
)


def test_everything_is_copied_but_code_and_weights(source: Path, out: Path):
    for name in (*COPIED, *LEFT):
        if not (source / name).exists():
            (source / name).write_text(f'{{"of": "{name}"}}')
    (source / "figures.json").mkdir()
    assert left_out(source) == [
        "LICENSE_keys.json",
        "README.md",
        "configuration_kimi_k3.py",
        "figure.png",
        "notes.txt",
        "secrets.json",
    ]
    written = write_side_files(source, out)
    assert sorted(written) == sorted({path.name for path in out.iterdir()})
    assert set(written) == {*COPIED, "tokenizer_config.json", GENERATION}
    for name in COPIED:
        assert (out / name).read_bytes() == (source / name).read_bytes()


def test_links_of_the_hubs_cache_become_files(source: Path, out: Path):
    blob = source.parent / "blob"
    (source / "tiktoken.model").rename(blob)
    (source / "tiktoken.model").symlink_to(blob)
    write_side_files(source, out)
    assert not (out / "tiktoken.model").is_symlink()
    assert (out / "tiktoken.model").read_bytes() == blob.read_bytes()


def test_nothing_points_at_code_that_is_not_there(source: Path, out: Path):
    config = json.loads((source / "tokenizer_config.json").read_text())
    assert "auto_map" in config
    (source / "processor_config.json").write_text(
        json.dumps({"media": [{"auto_map": {"x": "y.Z"}, "a": 1}], "b": 2.5})
    )
    write_side_files(source, out)
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert found == {k: v for k, v in config.items() if k != "auto_map"}
    processor = json.loads((out / "processor_config.json").read_text())
    assert processor == {"media": [{"a": 1}], "b": 2.5}


def test_a_complete_generation_config_is_kept_to_the_byte(source: Path, out: Path):
    write_side_files(source, out)
    assert (out / GENERATION).read_bytes() == (source / GENERATION).read_bytes()
    write_side_files(NANO_FOLDER, out)
    assert (out / GENERATION).read_bytes() == (NANO_FOLDER / GENERATION).read_bytes()


def test_an_absent_generation_config_is_written(source: Path, out: Path):
    (source / GENERATION).unlink()
    write_side_files(source, out)
    assert generation(out) == {
        "do_sample": True,
        "eos_token_id": [*ids_of(source), 7],
        "temperature": 1.0,
        "top_p": 0.95,
    }


def test_what_the_source_says_stays(source: Path, out: Path):
    mine = {"temperature": 0.6, "eos_token_id": 3, "max_length": 9}
    (source / GENERATION).write_text(json.dumps(mine))
    write_side_files(source, out)
    assert generation(out) == mine | {"do_sample": True, "top_p": 0.95}


def test_end_ids_without_a_tokenizer(source: Path, out: Path):
    (source / "tokenizer_config.json").unlink()
    (source / "tiktoken.model").unlink()
    (source / GENERATION).unlink()
    assert end_ids(source) == [7]
    (source / "config.json").write_text("{}")
    with pytest.raises(ConversionError, match="says nowhere which ids end a turn"):
        write_side_files(source, out)


DAMAGED = {
    "cut": (GENERATION, "{", r"generation_config\.json is not JSON"),
    "list": (GENERATION, "[]", r"generation_config\.json holds no JSON object"),
    "ids": (GENERATION, '{"eos_token_id": ["x"]}', r"eos_token_id is \['x'\]; wanted"),
    "hot": (GENERATION, '{"temperature": "hot"}', "temperature is 'hot'; wanted a"),
    "processor": ("processor_config.json", "{", r"processor_config\.json is not JSON"),
    "vocabulary": ("tiktoken.model", "a b c", r"tiktoken\.model, line 1: "),
    "empty": ("tiktoken.model", "", "holds 0 ranks but none for byte"),
    "names": ("tokenizer_config.json", "{}", "has no added_tokens_decoder"),
    "nameless": (
        "tokenizer_config.json",
        '{"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": {"5": {}}}',
        "does not name tokens as Kimi K3's does",
    ),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_files_are_named(source: Path, kind: str):
    name, content, message = DAMAGED[kind]
    read_side_files(source)
    (source / name).write_text(content)
    with pytest.raises(KimiK3Error, match=message):
        read_side_files(source)


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json"])
def test_half_a_tokenizer_is_none(source: Path, name: str):
    """B41: a file that copy patterns forget, or a link that leads nowhere."""
    (source / name).unlink()
    with pytest.raises(TokenizerError, match=f"{name} cannot be read"):
        read_side_files(source)
    (source / name).symlink_to("nowhere")
    with pytest.raises(KimiK3Error, match=f"{name} cannot be read"):
        read_side_files(source)


def test_side_files_are_in_order(source: Path):
    names = [path.name for path in side_files(source)]
    assert names == sorted(names) == ["tiktoken.model", "tokenizer_config.json"]
