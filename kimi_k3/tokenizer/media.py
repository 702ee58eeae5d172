"""Images in a prompt: one placeholder each, until their sizes are known.

A renderer sees content parts, not pixels. Whoever has the pixels puts in place of each
placeholder what the model reads,

    <|media_begin|>image 611x437<|media_content|><|media_pad|>…<|media_end|>

with the size as it was before resizing, and one pad for each 28 × 28 pixels after it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import ChatError
from .prompt import Piece, RenderedPrompt

#: Stands for an image in a rendered prompt. No id goes by this name, so a prompt with
#: one cannot be encoded by mistake.
IMAGE = Piece("<|kimi_image_placeholder|>", control=True)

#: Which id of the expanded prompt a model replaces by what it sees.
IMAGE_TOKEN = "<|media_pad|>"

_BEGIN, _CONTENT, _PAD, _END = (
    Piece(name, control=True)
    for name in ("<|media_begin|>", "<|media_content|>", IMAGE_TOKEN, "<|media_end|>")
)


@dataclass(frozen=True)
class ImageRule:
    """How far an image is shrunk, and so how many tokens it takes.

    The release's numbers: patches of ``patch`` pixels a side, ``merge`` × ``merge`` of
    them a token, at most ``patches`` in an image and ``side`` in a row or column.
    """

    patch: int = 14
    merge: int = 2
    patches: int = 65_536
    side: int = 512

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Pixels of ``width`` × ``height`` after shrinking, before padding."""
        whole = max(1, width // self.patch) * max(1, height // self.patch)
        longest = self.side * self.patch
        scale = min(
            1.0,
            math.sqrt(self.patches / whole),
            longest / width,
            longest / height,
        )
        across, down = (
            min(max(1, int(pixels * scale)), longest) for pixels in (width, height)
        )
        return across, down

    def tokens(self, width: int, height: int) -> int:
        """Tokens of an image that is ``width`` × ``height`` pixels before resizing."""
        edge = self.patch * self.merge
        across, down = self.resized(width, height)
        return math.ceil(across / edge) * math.ceil(down / edge)


def expand_images(
    prompt: str,
    sizes: Iterable[tuple[int, int]],
    rule: ImageRule = ImageRule(),
) -> RenderedPrompt:
    """``prompt`` with its images written out, to be encoded.

    ``sizes`` are (width, height) in pixels before resizing, in the prompt's order.
    Raises ChatError if they are not one for each image, or if ``prompt`` is not what
    ``apply_chat_template(tokenize=False)`` gave.
    """
    if not isinstance(prompt, RenderedPrompt):
        raise ChatError(
            "the prompt is an ordinary string, in which an image cannot be told from "
            "text that spells it; pass what apply_chat_template(tokenize=False) gave."
        )
    sizes = list(sizes)
    found = prompt.pieces.count(IMAGE)
    if found != len(sizes):
        raise ChatError(
            f"the prompt has {found} images and {len(sizes)} sizes were given; pass "
            "(width, height) of every image, in the order of the conversation."
        )
    left = iter(sizes)
    return RenderedPrompt(
        written
        for piece in prompt.pieces
        for written in (_written(next(left), rule) if piece == IMAGE else (piece,))
    )


def check_expanded(prompt: str) -> None:
    """Raise ChatError if ``prompt`` holds an image whose size is not known yet."""
    if isinstance(prompt, RenderedPrompt) and (found := prompt.pieces.count(IMAGE)):
        raise ChatError(
            f"the prompt holds {found} image{'s' if found > 1 else ''} without pixels; "
            "render with tokenize=False, give the prompt and the sizes to "
            "kimi_k3.tokenizer.media.expand_images, and encode what it returns."
        )


def _written(size: Any, rule: ImageRule) -> list[Piece]:
    width, height = size
    if min(width, height) < 1:
        raise ChatError(
            f"an image is {width} × {height} pixels; both have to be at least 1."
        )
    pads = [_PAD] * rule.tokens(width, height)
    return [_BEGIN, Piece(f"image {width}x{height}"), _CONTENT, *pads, _END]
