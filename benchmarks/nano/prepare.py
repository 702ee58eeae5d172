"""Make the nanos' texts, tokenizer and token files from downloaded sources.

python benchmarks/nano/prepare.py --sqlite better-sqlite3-12.11.1.tgz \\
    --poetry chinese-poetry-2.0.1.tgz --manual UNPACKED_DEB --out DATA

Writes DATA/tokenizer/ (the files of a K3 tokenizer), DATA/<domain>.train.npy and
DATA/<domain>.test.npy (token ids, uint16, documents divided by [EOS]) and
DATA/<domain>.test.jsonl (the held-out documents, for the samples that are kept here).
SOURCES.md says where the three archives come from.
"""

import argparse
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
from chats import Conversation, conversations
from corpora import HELD_OUT_SHARE, c_files, manual_pages, poems, python_files, split
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from kimi_k3.nano.tokenizer_files import write_tokenizer
from kimi_k3.tokenizer.bpe import SPLIT_PATTERN
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

#: Byte tokens and merges; the 256 control ids lie above them.
RANKS = 768
CHATS = 16_000
CHAT_SEED = 20

#: Characters of each domain that the merges are learnt from: Chinese ones count for
#: three bytes.
_MERGE_CHARACTERS = {"chinese": 400_000, "chat": 900_000}
_MARKER = re.compile(r"<\|[a-z_]+\|>")


def main() -> None:
    options = _parser().parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    texts = {
        "python": split(python_files(stdlib)),
        "c": split(c_files(options.sqlite)),
        "english": split(manual_pages(options.manual)),
        "chinese": split(poems(options.poetry)),
    }
    chats = list(islice(conversations(CHAT_SEED), CHATS))
    folder = out / "tokenizer"
    write_tokenizer(folder, vocab_size=512)
    tokenizer = _open(folder)
    sample = {name: "\n".join(parts[0]) for name, parts in texts.items()}
    sample["chat"] = "\n".join(_plain(tokenizer, chat) for chat in chats[:2500])
    write_tokenizer(folder, merges=_learn_merges(sample))
    tokenizer = _open(folder)
    for name, parts in texts.items():
        for part, documents in zip(("train", "test"), parts, strict=True):
            rows = (tokenizer.encode(text) for text in documents)
            _save(out / f"{name}.{part}.npy", rows, tokenizer)
        lines = [json.dumps({"text": t}, ensure_ascii=False) for t in parts[1]]
        (out / f"{name}.test.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    _save_chats(out, chats, tokenizer)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    for name in ("sqlite", "poetry", "manual", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    return parser


def _open(folder: Path) -> TikTokenTokenizer:
    (folder / "config.json").write_text('{"model_type": "kimi_k3"}')
    return TikTokenTokenizer.from_pretrained(str(folder))


def _plain(tokenizer: TikTokenTokenizer, chat: Conversation) -> str:
    """A rendered chat with its markers taken out."""
    messages, tools = chat
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    return _MARKER.sub("\n", str(text))


def _learn_merges(sample: dict[str, str]) -> list[bytes]:
    """The merges of ordinary byte-pair encoding, the most frequent first."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cut = (t[: _MERGE_CHARACTERS.get(n, 1_000_000)] for n, t in sample.items())
    learner.train_from_iterator(cut, trainer)
    byte_of = _byte_of_character()
    by_id = sorted(learner.get_vocab().items(), key=lambda item: item[1])
    tokens = [bytes(byte_of[char] for char in token) for token, _ in by_id]
    return [token for token in tokens if len(token) > 1]


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters; this is the way back."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + i): byte for i, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _save(path: Path, rows: Iterator[list[int]], tokenizer: TikTokenTokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("[EOS]")
    tokens = np.array([t for row in rows for t in (*row, end)], dtype=np.uint16)
    np.save(path, tokens)
    print(f"{path.name}: {len(tokens)} tokens", flush=True)


def _save_chats(
    out: Path, chats: list[Conversation], tokenizer: TikTokenTokenizer
) -> None:
    """Chats are held out by the hash of what the user asks first."""
    parts: tuple[list[Conversation], list[Conversation]] = ([], [])
    for chat in chats:
        asked = hashlib.blake2b(chat[0][0]["content"].encode()).digest()
        parts[asked[0] % HELD_OUT_SHARE == 0].append(chat)
    for part, found in zip(("train", "test"), parts, strict=True):
        rows = (
            list(tokenizer.apply_chat_template(m, tools=tools, tokenize=True))
            for m, tools in found
        )
        _save(out / f"chat.{part}.npy", rows, tokenizer)
    lines = [
        json.dumps(
            {"messages": m} | ({"tools": tools} if tools else {}), ensure_ascii=False
        )
        for m, tools in parts[1]
    ]
    (out / "chat.test.jsonl").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main()
