"""Stops, tool calls and drift of scripted answers, whose rates are known."""

from typing import Any

import pytest
from scripted_answers import TOKENIZER, ids_of, marked

from kimi_k3 import read_answer
from kimi_k3.answers.answers import Answer
from kimi_k3.answers.drift import drifts, prose
from kimi_k3.answers.generation_measures import Measurer
from kimi_k3.answers.generation_prompts import Prompt
from kimi_k3.answers.generation_sections import TEXT, Markers, Section
from kimi_k3.answers.stops import Stop, stop_of
from kimi_k3.answers.tool_calls import (
    ToolCalls,
    ToolChecker,
    calls_begun,
    judge_calls,
)
from kimi_k3.errors import EvaluationError

MARKERS = Markers(TOKENIZER)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "price",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string"},
                    "count": {"type": "integer", "minimum": 1},
                },
                "required": ["item", "count"],
                "additionalProperties": False,
            },
        },
    },
    {"name": "now"},
]

CALL = '<|open|>call tool="{}" index="1"<|sep|>{}<|close|>call<|sep|>'
ITEM = '<|open|>argument key="item" type="string"<|sep|>ink<|close|>argument<|sep|>'
COUNT = '<|open|>argument key="count" type="number"<|sep|>{}<|close|>argument<|sep|>'
THOUGHT = "I ask.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
CLOSED = "<|close|>message<|sep|>"


def sections(text: str, begins_in: str = "think") -> list[Section]:
    return MARKERS.sections(marked(text), begins_in)


def shape(found: list[Section]) -> list[tuple[str, str, bool]]:
    return [(s.name, TOKENIZER.decode(s.ids), s.closed) for s in found]


def answer(*calls: str) -> str:
    return f"{THOUGHT}<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>{CLOSED}"


def judged(text: str) -> ToolCalls:
    ids = marked(text)
    calls = read_answer(TOKENIZER, ids, tools=TOOLS).tool_calls
    return judge_calls(calls, calls_begun(ids, MARKERS), ToolChecker(TOOLS, "here"))


# Sections and stops


def test_sections():
    text = "So.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    assert shape(sections(text + CLOSED)) == [
        ("think", "So.", True),
        ("response", "Yes.", True),
    ]
    assert shape(sections("So.<|close|>think<|sep|><|open|>response<|sep|>Y")) == [
        ("think", "So.", True),
        ("response", "Y", False),
    ]
    # A response that begins while thinking was not closed.
    assert shape(sections("So.<|open|>response<|sep|>Y<|close|>response<|sep|>")) == [
        ("think", "So.", False),
        ("response", "Y", True),
    ]
    assert shape(sections("", "think")) == [("think", "", False)]
    # Calls are never inside calls, but a response may follow calls that were not closed.
    inside = "<|open|>think<|sep|>a<|open|>response<|sep|>Y<|close|>response<|sep|>"
    assert shape(sections(f"So.<|open|>tools<|sep|>{inside}")) == [
        ("think", "So.", False),
        ("tools", "<|open|>think<|sep|>a", False),
        ("response", "Y", True),
    ]


def test_text_that_spells_markers_is_text():
    ids = ids_of("So.<|close|>think<|sep|>")
    assert shape(MARKERS.sections(ids, "think")) == [
        ("think", "So.<|close|>think<|sep|>", False)
    ]
    assert len(MARKERS.sections(marked("a<|open|>response<|sep|>"), TEXT)) == 1


def test_a_tag_that_is_cut_belongs_to_its_section():
    assert shape(sections("So.<|close|>thi")) == [("think", "So.<|close|>thi", False)]


@pytest.mark.parametrize(
    ("end", "text", "wanted"),
    [
        ("<|end_of_msg|>", f"{THOUGHT}{CLOSED}", (True, "<|end_of_msg|>", None)),
        ("[EOS]", "So.", (True, "[EOS]", "think")),
        (None, "So it goes on and", (False, "length", "think")),
        (None, THOUGHT, (False, "length", None)),
        (None, f"{THOUGHT}<|open|>tools<|sep|>", (False, "length", "tools")),
    ],
)
def test_stops(end: str | None, text: str, wanted: tuple[bool, str, str | None]):
    assert stop_of(end, sections(text)) == Stop(*wanted)


def test_a_raw_completion_has_no_open_section():
    assert stop_of(None, sections("on and on", TEXT)).open_section is None


def test_without_closing():
    ids = marked(f"So.<|close|>think<|sep|>{CLOSED}")
    assert list(MARKERS.without_closing(ids)) == marked("So.")
    opened = marked("So.<|open|>response<|sep|>")
    assert list(MARKERS.without_closing(opened)) == opened


# Tool calls


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{THOUGHT}{CLOSED}", (0, 0, 0, 0)),
        (answer(CALL.format("price", ITEM + COUNT.format(2))), (1, 1, 1, 1)),
        (answer(CALL.format("now", "")), (1, 1, 1, 1)),
        (answer(CALL.format("prize", ITEM + COUNT.format(2))), (1, 1, 0, 0)),
        (answer(CALL.format("price", ITEM)), (1, 1, 1, 0)),
        (answer(CALL.format("price", ITEM + COUNT.format(0))), (1, 1, 1, 0)),
        (answer(CALL.format("price", ITEM + COUNT.format("two"))), (1, 1, 1, 0)),
        (answer(CALL.format("price", ITEM + COUNT.format(2)) * 3), (3, 3, 3, 3)),
        (answer(), (1, 0, 0, 0)),
        (answer("price of ink"), (1, 0, 0, 0)),
        (answer('<|open|>call index="1"<|sep|><|close|>call<|sep|>'), (1, 0, 0, 0)),
        # Cut while it called: one call is whole.
        (
            f"{THOUGHT}<|open|>tools<|sep|>{CALL.format('now', '')}"
            '<|open|>call tool="now"<|sep|>',
            (2, 1, 1, 1),
        ),
        # From thinking straight on, and without a section, as hosts take it too.
        (f"I ask.<|open|>tools<|sep|>{CALL.format('now', '')}", (1, 1, 1, 1)),
        (f"I ask.<|close|>think{CALL.format('now', '')}", (1, 1, 1, 1)),
        (f"I ask.{CALL.format('now', '')}<|open|>tools<|sep|>", (2, 1, 1, 1)),
    ],
)
def test_tool_calls(text: str, wanted: tuple[int, int, int, int]):
    assert judged(text) == ToolCalls(*wanted)


def test_known_rates_of_many_calls():
    good, wrong = CALL.format("price", ITEM + COUNT.format(3)), CALL.format("price", "")
    calls = [good] * 5 + [wrong] * 2 + [CALL.format("cost", "")] * 2
    broken = "<|open|>call<|sep|><|close|>call<|sep|>"
    assert judged(answer(*calls, broken)) == ToolCalls(10, 9, 7, 5)


def test_schemas_are_checked_before_anything_is_asked():
    def check(tool: Any) -> None:
        ToolChecker([tool], "chats, prompt 3")

    with pytest.raises(EvaluationError, match=r"prompt 3, tool 'a'.* no JSON schema"):
        check({"name": "a", "parameters": {"type": "objekt"}})
    with pytest.raises(EvaluationError, match="prompt 3 offers.*no tool with a name"):
        check({"type": "function"})
    with pytest.raises(EvaluationError, match="no tool with a name"):
        check("price")


def test_schemas_elsewhere_are_not_fetched():
    tool = {"name": "a", "parameters": {"$ref": "https://example.org/schema.json"}}
    assert not ToolChecker([tool], "here").accepts("a", {})


# Drift


@pytest.mark.parametrize(
    ("question", "said", "wanted"),
    [
        ("What is the capital of France?", "The capital of France is Paris.", False),
        ("What is the capital of France?", "法国的首都是巴黎，一座美丽的城市。", True),
        ("What is the capital of France?", "Столица Франции - город Париж.", True),
        ("法国的首都是什么？", "法国的首都是巴黎，一座美丽的城市。", False),
        ("法国的首都是什么？", "The capital of France is Paris, of course.", True),
        ("法国的首都是什么？", "可以用 Docker Compose 和 Kubernetes 部署。", False),
        ("フランスの首都は？", "フランスの首都はパリです。美しい都市。", False),
        ("法国的首都是什么？", "フランスのしゅとはパリです。うつくしい。", True),
        ("フランスの首都は？", "法国的首都是巴黎，一座美丽的城市。", True),
        # A part of the answer.
        ("Tell me more.", "It began well enough, 但是后来一切都变了样子没人知道", True),
        ("Tell me more.", "The sign for tea is 茶, and that for water is 水.", False),
        # Nothing that is judged.
        ("Tell me more.", "Yes, I will.", None),
        ("1 + 1?", "The capital of France is Paris.", None),
        ("Tell me more.", "```\n法国的首都是巴黎，一座美丽的城市。\n```", None),
        (
            "What does it say?",
            'The big red sign there says "法国的首都是巴黎，一座城市".',
            False,
        ),
        (
            "What does it say?",
            "The big red sign there says:\n> 法国的首都是巴黎\n",
            False,
        ),
        ("Print it.", "Here it is:\n```python\nprint('你好，世界，你好，世界')", None),
        # What the question quotes is not what it is written in.
        ("Translate “法国的首都是巴黎” please", "The capital of it is Paris.", False),
    ],
)
def test_drift(question: str, said: str, wanted: bool | None):
    assert drifts(question, said) is wanted


def test_known_rate_of_drift():
    english, chinese = "The answer is as simple as it was.", "答案和以前一样简单明了。"
    said = [english] * 13 + [chinese] * 7
    assert sum(bool(drifts("Why is it so?", one)) for one in said) == 7
    assert sum(bool(drifts("为什么会这样？", one)) for one in said) == 13


def test_prose():
    assert prose("a `b` c ```d\ne``` f https://g.h/i j") == "a   c   f   j"
    assert prose("it's Bob's idea") == "it's Bob's idea"
    assert prose("x\n> y\nz") == "x\n \nz"


def measured(text: str, begins_in: str, tools: Any = ()) -> dict[str, Any]:
    """Measure → numerator, of an answer that ends by itself."""
    ids = tuple(marked(text))
    given = Answer("c", 0, "greedy", 0, 0, "[EOS]", text, ids, "", "")
    prompt = Prompt("c", 0, (1,), begins_in, "What is the capital of France?", tools)
    pairs = Measurer(TOKENIZER).measure(given, prompt).pairs
    return {name: numerator for name, (numerator, _) in pairs.items()}


def test_thinking_and_response_are_judged_apart():
    english, chinese = "The answer is as simple as it was.", "答案和以前一样简单明了。"
    # However the model leaves its thinking.
    for end in ("<|close|>think<|sep|>", "<|close|>think", ""):
        text = f"{english}{end}<|open|>response<|sep|>{chinese}<|close|>response<|sep|>"
        found = measured(text, "think")
        assert (found["think_drift"], found["language_drift"]) == (0, 1)
        assert found["open_section"] == 0
    raw = measured(chinese, "text")
    assert raw["language_drift"] == 1
    assert "think_drift" not in raw


def test_a_call_is_read_with_the_tools_that_were_offered():
    """A block of JSON that is no object is the argument of a tool that takes one."""
    only = {"type": "object", "properties": {"only": {}}, "required": ["only"]}
    tools = ({"function": {"name": "f", "parameters": only}},)
    block = '<|open|>json type="object"<|sep|>[1]<|close|>json<|sep|>'
    found = measured(answer(CALL.format("f", block)), "think", tools)
    assert (found["calls_tools"], found["tool_call_valid"]) == (1, 1)
    text = measured(answer(CALL.format("f", block)), "text")
    assert not {"calls_tools", "calls_unoffered", "tool_call_parses"} & {*text}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": {"type": "number"}}}, {"a": "1e999"}),
        ({"properties": {"a": {"multipleOf": 0.01}}}, {"a": 10**400}),
        ({"$ref": "#"}, {"a": 1}),
    ],
    ids=["text", "huge", "endless"],
)
def test_what_cannot_be_judged_is_not_valid(schema: Any, arguments: dict[str, Any]):
    tool = {"function": {"name": "f", "parameters": schema}}
    assert not ToolChecker([tool], "x").accepts("f", arguments)


@pytest.mark.parametrize(
    "function",
    [
        None,
        "f",
        {"name": "f", "parameters": {"$schema": ["x"]}},
        {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/no"}}}},
    ],
    ids=["nothing", "text", "odd-schema", "dangling-reference"],
)
def test_tools_that_nothing_can_be_judged_by(function: Any):
    with pytest.raises(EvaluationError, match="chats, line 3"):
        ToolChecker([{"function": function}], "chats, line 3")


def test_a_schema_may_refer_to_its_own_parts():
    schema = {
        "properties": {"a": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "number"}},
    }
    checker = ToolChecker([{"function": {"name": "f", "parameters": schema}}], "x")
    assert checker.accepts("f", {"a": 1})
    assert not checker.accepts("f", {"a": "1"})
