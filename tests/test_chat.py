"""XTML rendering: ids against mlx-vlm's renderer, and structure nobody can forge."""

import copy
from pathlib import Path
from typing import Any

import pytest
from conversations import CONVERSATIONS, INJECTION, INJECTIONS, assistant, system, user
from lines import write_dense_tokenizer
from reference_chat import (
    ReferenceTokenizer,
    both_tokenizers,
    go_by_way_of_one_string,
)
from tokenizer_folders import write_tk

from kimi_k3.errors import ChatError
from kimi_k3.tokenizer import tokenizer as tokenizer_module
from kimi_k3.tokenizer.options import chat_options
from kimi_k3.tokenizer.prompt import Piece
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer
from kimi_k3.tokenizer.xtml import bare_tags, render

EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not "
    "including the response channel), supported values include `low`, `medium`, "
    "`high`, and `max`.\nNow the system is invoked with `thinking_effort=max`."
)


@pytest.fixture(scope="module", params=["TK", "dense"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TikTokenTokenizer, ReferenceTokenizer]:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    write_tk(folder)
    if request.param == "dense":
        write_dense_tokenizer(folder)
    return both_tokenizers(folder)


@pytest.fixture
def tk(pair: tuple[TikTokenTokenizer, ReferenceTokenizer]) -> TikTokenTokenizer:
    return pair[0]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_the_references(pair, name):
    ours, reference = pair
    messages, options = CONVERSATIONS[name]
    before = copy.deepcopy((messages, options))
    want = reference.chat_ids(copy.deepcopy(messages), **options)
    assert ours.apply_chat_template(messages, **options) == want
    prompt = ours.apply_chat_template(messages, tokenize=False, **options)
    assert ours.encode(prompt, add_special_tokens=False) == want
    assert ours.encode(prompt) == want
    assert ours.decode(want) == prompt
    assert (messages, options) == before


@pytest.mark.parametrize("name", INJECTIONS)
def test_only_the_renderer_places_control_ids(tk, name):
    """As many as for the same conversation with harmless text, and the text is there."""
    hostile, options = INJECTIONS[name]
    harmless, harmless_options = _replaced((hostile, options), "harmless")
    ids = tk.apply_chat_template(hostile, **options)
    controls = [i for i in ids if i >= tk.all_special_ids[0]]
    assert controls == [
        i
        for i in tk.apply_chat_template(harmless, **harmless_options)
        if i >= tk.all_special_ids[0]
    ]
    pieces = render(hostile, chat_options(**options))
    assert len(controls) == sum(piece.control for piece in pieces)
    for split in (None, True):
        plain = str.__str__(tk.apply_chat_template(hostile, tokenize=False, **options))
        encoded = tk.encode(plain, add_special_tokens=False, split_special_tokens=split)
        assert max(encoded) < tk.all_special_ids[0]


def _replaced(value: Any, harmless: str) -> Any:
    if isinstance(value, dict):
        items = value.items()
        return {_replaced(k, harmless): _replaced(v, harmless) for k, v in items}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, harmless) for each in value)
    spelt = value == INJECTION or (isinstance(value, str) and value.startswith("<|"))
    return harmless if spelt else value


def test_a_string_without_pieces_is_found_out(tk, monkeypatch):
    """The control count fails for a renderer that goes by way of one string."""
    go_by_way_of_one_string(monkeypatch)
    with pytest.raises(AssertionError):
        test_only_the_renderer_places_control_ids(tk, "user")


def test_where_text_pieces_end_matters(pair, monkeypatch):
    """Ids differ from the reference's once neighbouring texts are encoded as one."""
    ours, reference = pair
    original = tokenizer_module.render

    def joined(*args: Any) -> list[Piece]:
        pieces: list[Piece] = []
        for piece in original(*args):
            if pieces and not pieces[-1].control and not piece.control:
                piece = Piece(pieces.pop().text + piece.text)
            pieces.append(piece)
        return pieces

    monkeypatch.setattr(tokenizer_module, "render", joined)
    assert any(
        ours.apply_chat_template(messages, **options)
        != reference.chat_ids(copy.deepcopy(messages), **options)
        for messages, options in CONVERSATIONS.values()
    )


def test_a_conversation_as_text(tk):
    text = tk.apply_chat_template(
        [system("S"), user("U"), assistant("A", reasoning_content="R")],
        tokenize=False,
        add_generation_prompt=True,
    )
    assert text == (
        '<|open|>message role="system" type="thinking-effort"<|sep|>'
        f"{EFFORT}<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="system"<|sep|>S<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>U<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>R<|close|>think<|sep|>"
        "<|open|>response<|sep|>A<|close|>response<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
        '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
    )


@pytest.mark.parametrize(
    ("last", "options", "end"),
    [
        (user("Once"), {}, '<|open|>message role="user"<|sep|>Once'),
        (system("Be"), {}, '<|open|>message role="system"<|sep|>Be'),
        (assistant("Su"), {}, "<|close|>think<|sep|><|open|>response<|sep|>Su"),
        (
            assistant("Su", reasoning_content="R"),
            {},
            "<|open|>think<|sep|>R<|close|>think<|sep|><|open|>response<|sep|>Su",
        ),
        (assistant("", reasoning_content="R"), {}, '"<|sep|><|open|>think<|sep|>R'),
        (
            assistant("Su", reasoning_content="R"),
            {"continue_final_message": "reasoning_content"},
            '"<|sep|><|open|>think<|sep|>R',
        ),
        (assistant("Su"), {"thinking": False}, '"<|sep|><|open|>response<|sep|>Su'),
        (
            assistant("Su"),
            {"response_format": "json_object"},
            "formatting.<|close|>message<|sep|><|end_of_msg|>"
            '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
            "<|close|>think<|sep|><|open|>response<|sep|>Su",
        ),
    ],
)
def test_a_final_message_is_left_open(tk, last, options, end):
    options = {"continue_final_message": True} | options
    text = tk.apply_chat_template([user("Q"), last], tokenize=False, **options)
    assert text.endswith(end)


def test_hosts_names_for_thinking(tk):
    off = tk.apply_chat_template([user("Q")], thinking=False)
    assert tk.apply_chat_template([user("Q")], enable_thinking=False) == off
    assert tk.apply_chat_template([user("Q")], thinking=None) != off
    assert tk.apply_chat_template([user("Q")], enable_thinking=True) != off


def test_developer_is_system(tk):
    messages = [{"role": "developer", "content": "S"}]
    assert tk.apply_chat_template(messages) == tk.apply_chat_template([system("S")])


def test_options_that_mean_nothing_are_logged(tk, caplog):
    want = tk.apply_chat_template([user("Q")])
    assert not caplog.records
    assert tk.apply_chat_template([user("Q")], thinking_budget=3) == want
    assert "no option 'thinking_budget'" in caplog.text


def test_shapes_of_results(tk):
    one, two = [user("a")], [user("ab")]
    ids = tk.apply_chat_template(one)
    assert isinstance(ids, list)
    assert tk.apply_chat_template([one, two]) == [ids, tk.apply_chat_template(two)]
    texts = tk.apply_chat_template([one, two], tokenize=False)
    assert [tk.encode(text) for text in texts] == tk.apply_chat_template([one, two])
    batch = tk.apply_chat_template([one, two], return_dict=True, padding=True)
    assert batch["attention_mask"][0] == [1] * len(ids) + [0]
    array = tk.apply_chat_template(one, return_tensors="np", return_dict=True)
    assert array["input_ids"].tolist() == [ids]
    cut = tk.apply_chat_template(one, truncation=True, max_length=5, return_dict=True)
    assert cut["input_ids"] == ids[:5]


@pytest.mark.parametrize(
    "layout",
    [
        {"return_tensors": "np"},
        {"truncation": True, "max_length": 5},
        {"max_length": 0},
        {"padding": "max_length", "max_length": 10**6},
    ],
)
def test_a_list_of_ids_is_the_whole_conversation(tk, layout):
    ids = tk.apply_chat_template([user("a")])
    with pytest.raises(ChatError, match=f"has no {', '.join(layout)}; leave that out"):
        tk.apply_chat_template([user("a")], **layout)
    for default in (None, False):
        without = dict.fromkeys(layout, default)
        assert tk.apply_chat_template([user("a")], **without) == ids
    text = tk.apply_chat_template([user("a")], tokenize=False, **layout)
    assert tk.encode(text) == ids


def test_bare_tags_are_what_the_renderer_writes(tk):
    """A host that asks for a tag's ids finds them in a rendered prompt."""
    ids = tk.apply_chat_template(
        [assistant("a", tool_calls=[{"name": "f"}])], add_generation_prompt=True
    )
    for tag in ("think", "response", "tools", "message", "call"):
        wanted = tk.encode(f"<|close|>{tag}<|sep|>", add_special_tokens=False)
        places = range(len(ids) - len(wanted) + 1)
        assert any(ids[at : at + len(wanted)] == wanted for at in places)
    assert len(list(bare_tags())) == 14
