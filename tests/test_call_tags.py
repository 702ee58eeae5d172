"""Tags of calls as models leave them, known as control ids and in ordinary strings."""

import time
from typing import Any

import pytest
from answer_shapes import argument, asked, call, closed, opened, section, text_of

from kimi_k3.tokenizer.decoded import DecodedText
from kimi_k3.tokenizer.prompt import Piece
from kimi_k3.tokenizer.tool_parser import parse_tool_call
from kimi_k3.tokenizer.xtml import CLOSE, OPEN, SEP


@pytest.mark.parametrize(
    ("said", "arguments"),
    [(' {"path": "/x", "n": [1]}\n', {"path": "/x", "n": [1]}), (" \n", {}), ("{}", {}),
     ("/x", None), ("[1]", None), ('"/x"', None), ('{"path": "/x"', None)],
)  # fmt: skip
def test_text_of_a_call_without_tags_is_its_arguments_or_drops_it(
    said: str, arguments: Any
):
    """Never a call of the same name without them: it would do something else."""
    pieces = [*call("a"), *call("f", [Piece(said)]), *call("b", argument("x", "y"))]
    wanted = [] if arguments is None else [asked("f", **arguments)]
    machine = DecodedText.of(call("f", [Piece(said)]))[len("<|open|>call") : -11]
    for text in (DecodedText.of(pieces), text_of(pieces)):
        assert parse_tool_call(text) == [asked("a"), *wanted, asked("b", x="y")]
    for text in (machine, str.__str__(machine)):
        assert text.endswith("<|close|>")
        if wanted:
            assert parse_tool_call(text) == wanted
        else:
            with pytest.raises(ValueError, match="no whole tool call"):
                parse_tool_call(text)


def test_text_beside_an_argument_is_no_argument():
    pieces = call("f", [Piece("{}")], argument("a", "b"), [Piece('{"c": 1}')])
    for text in (DecodedText.of(pieces), text_of(pieces)):
        assert parse_tool_call(text) == [asked("f", a="b")]


@pytest.mark.parametrize("tag", ["argument", "json"])
def test_a_value_without_its_separator_drops_the_call_alone(tag: str):
    head = ' key="a" type="string"' if tag == "argument" else ""
    value = [OPEN, Piece(f"{tag}{head}{{}}"), *closed(tag)]
    pieces = [*call("a"), *call("f", value, argument("b", "c")), *call("g")]
    for text in (DecodedText.of(pieces), text_of(pieces)):
        assert parse_tool_call(text) == [asked("a"), asked("g")]


def test_a_call_opened_without_its_separator():
    whole = call("f", argument("a", "b"))
    pieces = [*call("a"), *whole[:2], *whole[3:], *call("g")]
    for text in (DecodedText.of(pieces), text_of(pieces)):
        assert parse_tool_call(text) == [asked("a"), asked("f", a="b"), asked("g")]


def test_only_the_end_of_a_call_proves_that_it_was_whole():
    begun = [*opened("call", ' tool="f"'), *argument("a", "b"), CLOSE]
    for word in ("", "c", "call", "too", "mess"):
        text = DecodedText.of([*begun, Piece(word)])
        assert parse_tool_call(text) == parse_tool_call(str.__str__(text))
        assert parse_tool_call(text) == [asked("f", a="b")]
    for word in ("think", "argument", "x"):
        text = DecodedText.of([*begun, Piece(word)])
        for given in (text, str.__str__(text)):
            with pytest.raises(ValueError, match="no whole tool call"):
                parse_tool_call(given)
    for cut in ([OPEN], [OPEN, Piece('call tool="g"')]):
        pieces = [*begun[:-1], *cut]
        for text in (DecodedText.of(pieces), text_of(pieces)):
            with pytest.raises(ValueError, match="no whole tool call"):
                parse_tool_call(text)
    # A close without a word in the middle ends nothing.
    pieces = [*begun[:3], CLOSE, SEP, *begun[3:], Piece("call"), SEP]
    for text in (DecodedText.of(pieces), text_of(pieces)):
        assert parse_tool_call(text) == [asked("f", a="b")]


@pytest.mark.parametrize(
    "text", ["<|open|>call" * 2000,
             "<|open|>json<|sep|>" * 5000 + "<|close|>json<|sep|><|x|>" * 5000,
             '<|open|>call tool="' + "a" * 50_000, "<|open|>json<|sep|>" + "{" * 50_000,
             '<|open|>call tool="f"<|sep|>' + "<|close|>argument<|sep|>" * 4000,
             DecodedText.of([*opened("call", " " + "a" * 80_000), *closed("call")])],
    ids=["opened", "unclosed", "header", "json", "closed", "attributes"],
)  # fmt: skip
def test_no_text_takes_long(text: str):
    """A second would be noticed: others wait meanwhile."""
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="no whole tool call"):
        parse_tool_call(text)
    assert time.perf_counter() - begun < 1


def test_spelled_markers_survive_in_ordinary_strings_where_structure_tells():
    """A string without knowledge: only what may follow a value's end can end it."""
    said = (
        "a <|close|>argument<|sep|> b",
        '<|open|>call tool="x"<|sep|>',
        "<|close|>call<|sep|>",
        '{"a": "<|close|>json<|sep|> "}',
    )
    for text in said:
        pieces = [*call("f", argument("a", text)), *call("g", argument("b", "c"))]
        assert parse_tool_call(text_of(pieces)) == [
            asked("f", a=text),
            asked("g", b="c"),
        ]


def test_text_between_the_values_of_an_ordinary_string_is_left_out():
    stray = [Piece(" odd < text ")]
    pieces = [
        *call("f", argument("a", "v"), stray, argument("b", "w"), stray),
        *call("g", section("json", '{"c": 1}'), stray),
    ]
    wanted = [asked("f", a="v", b="w"), asked("g", c=1)]
    for text in (DecodedText.of(pieces), text_of(pieces)):
        assert parse_tool_call(text) == wanted
