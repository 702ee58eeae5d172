"""Lines of text that tokenizers get wrong, and a vocabulary that shows it."""

import base64
import random
from collections import Counter
from pathlib import Path

from kimi_k3.nano.tokenizer_files import write_tokenizer

_PARTS = (
    *("hello", "Hello", "HELLO", "hELLo", "don't", "DON'T", "we'll", "it’s", "naïve"),
    *(
        "中文",
        "你好",
        "漢字",
        "日本語",
        "한국어",
        "ひらがな",
        "カタカナ",
        "々",
        "〇",
        "㐀",
    ),
    *("ok中", "中ok", "OK中", "中OK"),
    *("𠀀", "Ελλάδα", "Привет", "עברית", "हिन्दी", "ไทย", "Ⅷ", "ǅ", "ªº", "ß", "ſ"),
    *("“quoted”", "‘single’", "—", "…", "!", "?!", "::", "->", "</tag>", "\\", '"'),
    *("1", "12", "123", "1234", "1234567", "٣٤٥", "½", "１２３", "3.14", "1,000"),
    *("😀", "👩‍👩‍👧", "🇩🇪", "e\u0301", "\u200d", "\ufeff", "\u0000", "\x1c", "\x85"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\r", "\u00a0", "\u3000"),
    *("def f(x):", "    return x", "x=1;", "a_b", "CamelCase", "<|open|>", "[EOS]"),
)


def sample_lines(count: int = 200, seed: int = 0) -> list[str]:
    """``count`` lines put together at random: scripts, digits, spaces, emoji, CRLF."""
    rng = random.Random(seed)
    return [
        "".join(rng.choice(_PARTS) for _ in range(rng.randint(1, 24)))
        for _ in range(count)
    ]


def write_dense_tokenizer(folder: Path, merges: int = 200) -> None:
    """A K3 tokenizer whose merges cross every kind of boundary.

    They come from the sample lines without any splitting, so ids show where a text was
    split: a different split forbids other merges.
    """
    write_tokenizer(folder, vocab_size=512)
    sequences = [
        [bytes([byte]) for byte in line.encode()] for line in sample_lines(60, 1)
    ]
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(merges):
        pairs = Counter(
            pair
            for tokens in sequences
            for pair in zip(tokens, tokens[1:], strict=False)
        )
        known = set(tokens)
        merged = next(
            a + b
            for (a, b), _ in pairs.most_common()
            # No rank spells a control name.
            if a + b not in known and b"|>" not in a + b
        )
        tokens.append(merged)
        sequences = [_merge(sequence, merged) for sequence in sequences]
    lines = [b"%s %d" % (base64.b64encode(t), rank) for rank, t in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines))
    config = (folder / "tokenizer_config.json").read_text()
    for place in sorted(range(256), reverse=True):
        config = config.replace(f'"{256 + place}":', f'"{256 + merges + place}":')
    (folder / "tokenizer_config.json").write_text(config)


def _merge(tokens: list[bytes], merged: bytes) -> list[bytes]:
    result: list[bytes] = []
    place = 0
    while place < len(tokens):
        pair = b"".join(tokens[place : place + 2])
        width = 2 if pair == merged and place + 1 < len(tokens) else 1
        result.append(b"".join(tokens[place : place + width]))
        place += width
    return result
