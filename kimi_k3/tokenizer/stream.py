"""Text of ids as they arrive: whole characters only, constant work for each id."""

import codecs
from typing import Any

from mlx_lm.tokenizer_utils import StreamingDetokenizer


class Utf8Detokenizer(StreamingDetokenizer):
    """mlx-lm's streaming interface over a tokenizer that knows the bytes of an id.

    Bytes of an incomplete character are held back until it is complete, or until
    :meth:`finalize`, which shows U+FFFD for them. The text equals the tokenizer's
    ``decode(tokens)`` at the end. mlx-lm's own choice for this tokenizer decodes the
    current line again for each id.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self.reset()

    def reset(self) -> None:
        self.tokens: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._shown: list[str] = []
        self._fresh: list[str] = []

    def add_token(self, token: int) -> None:
        self.tokens.append(token)
        self._fresh.append(self._decoder.decode(self._tokenizer.bytes_of([token])))

    def finalize(self) -> None:
        self._fresh.append(self._decoder.decode(b"", final=True))

    @property
    def last_segment(self) -> str:
        segment = "".join(self._fresh)
        self._shown.append(segment)
        self._fresh = []
        return segment

    @property
    def text(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return "".join(self._shown) + "".join(self._fresh)
