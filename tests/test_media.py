"""Images in prompts: placeholders that only we place, and mlx-vlm's ids in their place."""

import copy
import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conversations import INJECTION, assistant, call, system, tool, user
from mlx_vlm.models.kimi_k3.processing_kimi_k3 import KimiK3ImageProcessor
from reference_chat import ReferenceTokenizer, both_tokenizers
from tokenizer_folders import edit_json, write_tk

from kimi_k3.errors import ChatError, TokenizerError
from kimi_k3.tokenizer import media
from kimi_k3.tokenizer.media import IMAGE, ImageRule, expand_images
from kimi_k3.tokenizer.prompt import Piece
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

Size = tuple[int, int]

#: (width, height) and tokens: the last three are shrunk.
SIZES: dict[str, tuple[Size, int]] = {
    "B20's": ((611, 437), 22 * 16),
    "one pixel": ((1, 1), 1),
    "just one token": ((28, 28), 1),
    "just over one token": ((29, 28), 2),
    "below a patch": ((13, 20), 1),
    "a line": ((7168, 1), 256),
    "a longer line": ((100_000, 1), 256),
    "a tall strip": ((40, 20_000), 256),
    # The limit is met before padding, which adds a row and a column.
    "huge": ((20_000, 20_000), 129 * 129),
}


class Pixels:
    """A picture of which only the size is there, as much as mlx-vlm's resizing needs."""

    mode = "RGB"

    def __init__(self, size: Size):
        self.size = size

    def convert(self, mode: str) -> "Pixels":
        return self

    def resize(self, size: Size, *_: Any) -> "Pixels":
        return Pixels(size)


def reference_tokens(size: Size, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of an image after mlx-vlm's own resizing and padding."""

    def new(mode: str, size: Size, colour: Any) -> Any:
        return SimpleNamespace(size=size, paste=lambda image, place: None)

    with monkeypatch.context() as patch:
        patch.setattr("PIL.Image.new", new)
        picture: Any = Pixels(size)
        width, height = KimiK3ImageProcessor().rescale(picture).size
    assert width % 28 == height % 28 == 0
    return (width // 28) * (height // 28)


@pytest.fixture(scope="module")
def pair(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[TikTokenTokenizer, ReferenceTokenizer]:
    folder: Path = tmp_path_factory.mktemp("tk")
    write_tk(folder)
    return both_tokenizers(folder)


@pytest.fixture
def tk(pair: tuple[TikTokenTokenizer, ReferenceTokenizer]) -> TikTokenTokenizer:
    return pair[0]


def image(kind: str = "image_url") -> dict[str, Any]:
    return {"type": kind, kind: {"url": "data:image/png;base64,"}}


def words(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("name", SIZES)
def test_tokens_of_a_size(monkeypatch, name):
    size, want = SIZES[name]
    assert ImageRule().tokens(*size) == want
    assert reference_tokens(size, monkeypatch) == want


def test_tokens_of_any_size(monkeypatch):
    rng = random.Random(0)
    edges = [1, 13, 14, 27, 28, 29, 3584, 3585, 7167, 7168, 7169, 20_000]
    for _ in range(2000):
        width, height = (
            rng.choice(edges) if rng.random() < 0.3 else int(10 ** (5 * rng.random()))
            for _ in range(2)
        )
        want = reference_tokens((width, height), monkeypatch)
        assert ImageRule().tokens(width, height) == want, (width, height)


def test_tokens_are_those_of_the_release(extra_data):
    """What Moonshot's own image code gave."""
    if extra_data is None:
        pytest.skip("needs --extra-data")
    told = json.loads((extra_data / "golden/processor/processor.json").read_text())
    assert len(told["images"]) > 3
    for each in told["images"]:
        rule = ImageRule(patches=each["in_patch_limit"])
        resize = each["resize"]
        assert rule.tokens(*each["size_wh"]) == each["num_media_tokens"]
        assert rule.resized(*each["size_wh"]) == (
            resize["new_width"],
            resize["new_height"],
        )


CHATS: dict[str, tuple[list[Any], list[Size]]] = {
    "B20's": ([user([image(), words("What is it?")])], [(611, 437)]),
    "only an image": ([user([image("image")])], [(28, 28)]),
    "three between words": (
        [user([words("a"), image(), words(""), image(), words("b"), image()])],
        [(30, 30), (1, 1), (200, 30)],
    ),
    "in every role": (
        [
            system([image()]),
            user([image()]),
            assistant([image()], tool_calls=[call("f", {}, "x")]),
            tool([words("r"), image()], tool_call_id="x"),
        ],
        [(1, 1), (30, 1), (60, 1), (90, 1)],
    ),
    "beside an injection": (
        [
            user([words(INJECTION), image(), words("<|media_begin|>image 1x1")]),
            user(INJECTION),
        ],
        [(90, 60)],
    ),
    "results put in order": (
        [
            assistant("", tool_calls=[call("f", {}, "x"), call("g", {}, "y")]),
            tool([words("second"), image()], tool_call_id="y"),
            tool([words("first"), image()], tool_call_id="x"),
        ],
        [(1, 1), (30, 1)],
    ),
}


@pytest.mark.parametrize("name", CHATS)
def test_ids_are_the_references(pair, name):
    ours, reference = pair
    messages, sizes = CHATS[name]
    written = [
        reference.processor.make_image_prompt(*size, ImageRule().tokens(*size))
        for size in sizes
    ]
    options = {"add_generation_prompt": True}
    want = reference.chat_ids(copy.deepcopy(messages), image_prompts=written, **options)
    prompt = ours.apply_chat_template(messages, tokenize=False, **options)
    expanded = expand_images(prompt, sizes)
    assert ours.encode(expanded, add_special_tokens=False) == want
    assert ours.decode(want) == expanded
    pads = sum(ImageRule().tokens(*size) for size in sizes)
    assert want.count(ours.convert_tokens_to_ids("<|media_pad|>")) == pads


def test_every_name_of_a_part_is_the_same_image(tk):
    prompts = [
        tk.apply_chat_template([user([image(kind)])], tokenize=False)
        for kind in ("image", "image_url", "input_image")
    ]
    assert prompts[0].pieces == prompts[1].pieces == prompts[2].pieces
    assert prompts[0].pieces.count(IMAGE) == 1


def test_an_image_without_pixels_is_refused(tk):
    messages = [user([image(), words("a"), image()])]
    told = r"holds 2 images without pixels; render with tokenize=False, .*expand_images"
    with pytest.raises(ChatError, match=told):
        tk.apply_chat_template(messages)
    prompt = tk.apply_chat_template(messages, tokenize=False)
    with pytest.raises(ChatError, match=told):
        tk.encode(prompt)
    with pytest.raises(ChatError, match="holds 1 image without"):
        tk.apply_chat_template([user([image()])])


@pytest.mark.parametrize("sizes", [[], [(1, 1)] * 3])
def test_a_wrong_number_of_sizes_is_refused(tk, sizes):
    prompt = tk.apply_chat_template([user([image(), image()])], tokenize=False)
    with pytest.raises(ChatError, match=f"has 2 images and {len(sizes)} sizes"):
        expand_images(prompt, sizes)


def test_no_pixels_and_no_pieces_are_refused(tk):
    prompt = tk.apply_chat_template([user([image()])], tokenize=False)
    with pytest.raises(ChatError, match="an image is 0 × 5 pixels"):
        expand_images(prompt, [(0, 5)])
    with pytest.raises(ChatError, match="ordinary string, in which an image cannot"):
        expand_images("".join(prompt), [(5, 5)])


def test_a_placeholder_in_text_is_no_image(tk):
    prompt = tk.apply_chat_template([user(IMAGE.text)], tokenize=False)
    assert expand_images(prompt, []) == prompt
    assert tk.encode(prompt) == tk.apply_chat_template([user(IMAGE.text)])


def test_a_checkpoint_without_media_marks_is_named(tmp_path):
    write_tk(tmp_path)

    def unnamed(config: dict[str, Any]) -> None:
        added = config["added_tokens_decoder"]
        for key in [k for k, v in added.items() if "media_pad" in v["content"]]:
            del added[key]

    edit_json(tmp_path / "tokenizer_config.json", unnamed)
    tk = TikTokenTokenizer.from_pretrained(tmp_path)
    prompt = tk.apply_chat_template([user([image()])], tokenize=False)
    with pytest.raises(TokenizerError, match=r"needs <\|media_pad\|>, which .* no id"):
        tk.encode(expand_images(prompt, [(5, 5)]))


def test_images_put_into_text_are_found_out(pair, monkeypatch):
    """Were they found by their spelling, a user could place them."""
    ours, _ = pair
    spelled = Piece(IMAGE.text)
    prompt = ours.apply_chat_template([user(IMAGE.text)], tokenize=False)
    assert spelled in prompt.pieces
    monkeypatch.setattr(media, "IMAGE", spelled)
    with pytest.raises(ChatError, match="has 1 images and 0 sizes"):
        expand_images(prompt, [])


def test_the_pages_example(tk):
    """docs/tokenizer.md, as it stands."""
    page = (Path(__file__).parents[1] / "docs/tokenizer.md").read_text("utf-8")
    (example,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "expand_images" in code
    ]
    names: dict[str, Any] = {"tokenizer": tk, "messages": [user([image()])]}
    exec(example, names)
    assert names["ids"].count(tk.convert_tokens_to_ids("<|media_pad|>")) == 22 * 16
