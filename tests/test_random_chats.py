"""Conversations at random: ids = mlx-vlm's, and what was said is read back from them."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lines import write_dense_tokenizer
from random_chats import Chat
from reference_chat import ReferenceTokenizer
from tokenizer_folders import write_tk

from kimi_k3.tokenizer import xtml
from kimi_k3.tokenizer.options import chat_options
from kimi_k3.tokenizer.prompt import Piece
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer
from kimi_k3.tokenizer.xtml import render

SEEDS = range(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("dense")
    write_tk(folder)
    write_dense_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TikTokenTokenizer:
    return TikTokenTokenizer.from_pretrained(folder)


def test_ids_are_the_references(folder, tokenizer):
    reference = ReferenceTokenizer(folder)
    for seed in SEEDS:
        chat = Chat(seed)
        want = reference.chat_ids(copy.deepcopy(chat.messages), **chat.options)
        assert tokenizer.apply_chat_template(chat.messages, **chat.options) == want, (
            f"seed {seed}"
        )


def test_what_was_said_is_read_back(tokenizer):
    """Only the renderer's marks are control ids, and texts between them are whole."""
    for seed in SEEDS:
        check(tokenizer, Chat(seed))


def check(tokenizer: TikTokenTokenizer, chat: Chat) -> None:
    ids = tokenizer.apply_chat_template(chat.messages, **chat.options)
    pieces = render(chat.messages, chat_options(**chat.options))
    placed = [piece.text for piece in pieces if piece.control]
    first = tokenizer.all_special_ids[0]
    assert [tokenizer.decode([i]) for i in ids if i >= first] == placed
    assert tokenizer.decode(ids) == "".join(piece.text for piece in pieces)
    assert set(said(chat)) <= set(sections(tokenizer, ids))


def said(chat: Chat) -> Iterator[tuple[str, str]]:
    """(tag, text) of the conversation, each as one section of the prompt."""
    thinking = chat.options.get("thinking", True)
    for message in chat.messages:
        if message.get("tools"):
            continue
        content = message["content"] or ""
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        if message["role"] != "assistant":
            yield "message", content
            continue
        yield "response", content
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        if thinking:
            yield "think", reasoning if reasoning.strip() else ""
        for call in message.get("tool_calls", ()):
            yield from arguments(call["function"]["arguments"])


def arguments(given: Any) -> Iterator[tuple[str, str]]:
    if isinstance(given, str) and given.strip():
        try:
            given = json.loads(given)
        except ValueError:
            yield "json", given
            return
    for value in (given or {}).values() if isinstance(given, dict) else ():
        yield (
            "argument",
            value if isinstance(value, str) else json.dumps(value, ensure_ascii=False),
        )


def sections(tokenizer: TikTokenTokenizer, ids: list[int]) -> Iterator[tuple[str, str]]:
    """(tag, text) between an opening tag and the next mark, read from the ids."""
    names = ("<|open|>", "<|sep|>")
    opens, separates = map(tokenizer.convert_tokens_to_ids, names)
    first = tokenizer.all_special_ids[0]
    marks = [n for n, token_id in enumerate(ids) if token_id >= first]
    for here, sep, after in zip(marks, marks[1:], marks[2:], strict=False):
        if ids[here] == opens and ids[sep] == separates:
            tag = str(tokenizer.decode(ids[here + 1 : sep])).split(" ")[0]
            yield tag, str(tokenizer.decode(ids[sep + 1 : after]))


def test_a_text_that_becomes_structure_is_found_out(tokenizer, monkeypatch):
    monkeypatch.setattr(
        xtml._Page,
        "text",
        lambda self, *texts: self.pieces.extend(
            Piece(text, control=text == "<|sep|>") for text in texts if text
        ),
    )
    with pytest.raises(AssertionError):
        test_what_was_said_is_read_back(tokenizer)
