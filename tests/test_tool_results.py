"""Tool results under the call they answer: by id, else by name and order, or refused."""

import re
from itertools import permutations
from typing import Any

import pytest
from conversations import assistant, call, system, tool, user

from kimi_k3.errors import ChatError
from kimi_k3.tokenizer import tool_results
from kimi_k3.tokenizer.messages import read_conversation
from kimi_k3.tokenizer.tool_results import pair_results

Results = list[tuple[str | None, int, str]]


def calling(*calls: tuple[str, str | None]) -> dict[str, Any]:
    """An assistant message with calls (name, id)."""
    return assistant("", tool_calls=[call(name, {}, id_) for name, id_ in calls])


def paired(*messages: dict[str, Any], reply: bool = True) -> Results:
    """(tool, number, content) of the results, in the order they are rendered."""
    found = pair_results(read_conversation(messages), reply=reply)
    return [(m.tool, m.tool_index, m.text) for m in found if m.role == "tool"]


def refusal(*messages: dict[str, Any], reply: bool = True) -> str:
    with pytest.raises(ChatError) as error:
        paired(*messages, reply=reply)
    return str(error.value)


TWO = calling(("a", "one"), ("b", "two"))
ONE_ANSWER = tool("A", tool_call_id="one")
TWO_ANSWER = tool("B", tool_call_id="two")
BOTH = [("a", 1, "A"), ("b", 2, "B")]


def test_by_id_in_any_order():
    """Calls of one name too, which nothing else tells apart."""
    calls = calling(("f", "i0"), ("g", "i1"), ("f", "i2"), ("f", "i3"))
    want = [("f", 1, "0"), ("g", 2, "1"), ("f", 3, "2"), ("f", 4, "3")]
    for order in permutations(range(4)):
        results = [tool(str(n), tool_call_id=f"i{n}") for n in order]
        assert paired(user("Go"), calls, *results) == want


def test_an_id_goes_before_a_name():
    renamed = tool("B", tool_call_id="two", name="a")
    assert paired(TWO, renamed, ONE_ANSWER) == BOTH


def test_an_id_may_be_a_number():
    calls = assistant("", tool_calls=[{"id": 7, "function": {"name": "f"}}])
    assert paired(calls, tool("r", tool_call_id="7")) == [("f", 1, "r")]


@pytest.mark.parametrize("between", [user("wait"), system("Be brief.")])
def test_results_may_stand_apart(between):
    """Each in its place, under its own call's number."""
    assert paired(TWO, TWO_ANSWER, between, ONE_ANSWER) == BOTH[::-1]
    assert paired(TWO, between, TWO_ANSWER, ONE_ANSWER) == BOTH


@pytest.mark.parametrize(
    ("results", "want"),
    [
        ([tool("A"), tool("B")], BOTH),
        ([tool("A", name="a"), tool("B", name="b")], BOTH),
        ([tool("B", name="b"), tool("A", name="a")], BOTH),
        ([tool("B", tool="b"), tool("A")], BOTH),
        ([tool("A"), TWO_ANSWER], BOTH),
        ([TWO_ANSWER, tool("A")], BOTH),
        ([tool("A", tool_call_id=None), tool("B", tool_call_id="")], BOTH),
    ],
)
def test_without_ids_by_name_then_by_order(results, want):
    assert paired(TWO, *results) == want


def test_calls_of_one_name_are_answered_in_order():
    calls = calling(("f", None), ("g", None), ("f", None))
    results = [tool("x", name="f"), tool("y", name="f"), tool("z", name="g")]
    assert paired(calls, *results) == [("f", 1, "x"), ("g", 2, "z"), ("f", 3, "y")]


THREE = calling(("f", "one"), ("g", "two"), ("h", "three"))


@pytest.mark.parametrize(
    "results",
    [
        [tool("G"), tool("H", tool_call_id="three"), ONE_ANSWER],
        [tool("H", name="h"), ONE_ANSWER, tool("G")],
        [tool("H", name="h"), tool("G", name="g"), ONE_ANSWER],
    ],
)
def test_beside_ids_a_name_or_the_only_call_left_decides(results):
    want = [("f", 1, "A"), ("g", 2, "G"), ("h", 3, "H")]
    assert paired(THREE, *results) == want


@pytest.mark.parametrize(
    ("calls", "results", "waiting"),
    [
        (THREE, [ONE_ANSWER, tool("G"), tool("H")], "'two', call 1 (g), 'three'"),
        (THREE, [tool("H"), ONE_ANSWER, tool("G")], "'two', call 1 (g), 'three'"),
        (
            calling(("f", "one"), ("g", "two"), ("g", "three")),
            [tool("3", name="g"), ONE_ANSWER, tool("2", name="g")],
            "'two', call 1 (g), 'three', call 2 (g)",
        ),
    ],
)
def test_beside_ids_order_decides_nothing(calls, results, waiting):
    """Results with ids come in any order, and others among them may too."""
    told = refusal(calls, *results)
    assert f"can be told to be its own (waiting: {waiting}" in told


def test_an_id_of_the_message_counts_if_it_is_a_calls():
    assert paired(TWO, tool("B", id="two"), tool("A", id="one")) == BOTH
    by_name = tool("B", id="msg_2", name="b"), tool("A", id="msg_1", name="a")
    assert paired(TWO, *by_name) == BOTH
    both = tool("A", id="two", tool_call_id="one")
    assert paired(TWO, both, tool("B", id="two", tool_call_id=None)) == BOTH
    assert paired(user("a"), tool("r", id="m", name="f")) == [("f", 1, "r")]


def test_calls_sent_apart_are_one_turn():
    apart = calling(("a", "one")), calling(("b", "two"))
    assert paired(*apart, TWO_ANSWER, ONE_ANSWER) == BOTH
    assert paired(user("Go"), *apart, tool("A"), tool("B")) == BOTH
    three = *apart, calling(("c", "three"))
    assert paired(*three, TWO_ANSWER, ONE_ANSWER, tool("C"))[2] == ("c", 3, "C")


@pytest.mark.parametrize(
    "says", [{"content": "So"}, {"reasoning": "Hm"}, {"name": "other"}]
)
def test_a_message_that_says_something_is_a_turn_of_its_own(says):
    second = calling(("b", "two")) | says
    told = refusal(calling(("a", "one")), second, ONE_ANSWER, TWO_ANSWER)
    assert "no tool result follows for 'one', call 0 (a)" in told


def test_an_id_may_come_again_in_a_later_turn():
    """Kimi's own ids, functions.f:0, do so in clients that count anew."""
    turn = [calling(("f", "f:0")), tool("r", tool_call_id="f:0")]
    assert paired(user("Go"), *turn, *turn) == [("f", 1, "r")] * 2


def test_a_result_of_no_call_keeps_the_name_it_brings():
    assert paired(user("a"), tool("r", name="search")) == [("search", 1, "r")]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        (
            [TWO, ONE_ANSWER, tool("?", tool_call_id="three")],
            "message 2 is a tool result for tool_call_id 'three', which is no call of "
            "the last assistant message (message 0, with calls 'one', 'two')",
        ),
        (
            [user("a"), tool("?", tool_call_id="three")],
            "message 1 is a tool result for tool_call_id 'three', which is no call of "
            "any assistant message",
        ),
        (
            [assistant("Hi"), tool("?", tool_call_id="three")],
            "'three', which is no call of the last assistant message (message 0, with "
            "no calls)",
        ),
        (
            [calling(("f", None)), tool("?", tool_call_id="three")],
            "'three', which is no call of the last assistant message (message 0, with "
            "calls without ids)",
        ),
        (
            [TWO, ONE_ANSWER, TWO_ANSWER, calling(("c", "three")), ONE_ANSWER],
            "message 4 is a tool result for tool_call_id 'one', which is a call of "
            "message 0, before the last assistant message (message 3, with calls "
            "'three')",
        ),
        (
            [TWO, ONE_ANSWER, TWO_ANSWER, assistant("Done"), ONE_ANSWER],
            "'one', which is a call of message 0, before the last assistant message",
        ),
        (
            [TWO, ONE_ANSWER, TWO_ANSWER, ONE_ANSWER],
            "message 3 is a tool result for tool_call_id 'one', which message 1 "
            "answers already",
        ),
        (
            [calling(("a", "one"), ("b", "one")), ONE_ANSWER, ONE_ANSWER],
            "'one', which 2 calls of message 0 share",
        ),
        (
            [TWO, TWO_ANSWER],
            "message 0 calls tools, but no tool result follows for 'one', call 0 (a);",
        ),
        (
            [TWO, TWO_ANSWER, assistant("So")],
            "no tool result follows for 'one', call 0 (a);",
        ),
        (
            [TWO, assistant("So")],
            "no tool result follows for 'one', call 0 (a), 'two', call 1 (b);",
        ),
        ([TWO, user("Well?")], "no tool result follows for 'one', call 0 (a), 'two'"),
        ([TWO], "no tool result follows for 'one', call 0 (a), 'two', call 1 (b);"),
        (
            [calling(("f", None), ("f", None)), tool("r")],
            "no tool result follows for call 1 (f);",
        ),
        (
            [calling(("f", None), ("f", None)), tool("r", name="f")],
            "no tool result follows for call 1 (f);",
        ),
        (
            [TWO, ONE_ANSWER, TWO_ANSWER, tool("?")],
            "message 3 is a tool result without a tool_call_id, and none of message "
            "0's calls can be told to be its own (waiting: none)",
        ),
        (
            [TWO, tool("?", name="c"), ONE_ANSWER],
            "message 1 is a tool result of 'c' without a tool_call_id, and none of "
            "message 0's calls can be told to be its own (waiting: 'two', call 1 (b))",
        ),
        (
            [TWO, tool("A", name="a"), tool("?", name="a")],
            "message 2 is a tool result of 'a' without a tool_call_id",
        ),
        (
            [user("a"), tool("?")],
            "message 1 is a tool result that no tool call before it asked for; give it "
            "'name', or 'tool_call_id' of a call",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(messages, told):
    assert told in refusal(*messages)


def test_calls_may_stand_unanswered_at_the_end():
    """Where no reply is asked: conversations to learn from end on calls."""
    assert paired(user("Go"), TWO, reply=False) == []
    assert "for 'two'" in refusal(user("Go"), TWO, ONE_ANSWER, reply=False)
    assert "for 'one'" in refusal(user("Go"), TWO, user("Well?"), reply=False)


def test_calls_without_ids_may_go_unanswered():
    assert paired(calling(("f", None)), user("Well?")) == []


def test_a_pairing_by_position_is_found_out(monkeypatch):
    """Were ids not looked at, results would stand under the wrong calls."""
    monkeypatch.setattr(tool_results, "_by_id", lambda first, results, older: {})
    assert paired(TWO, TWO_ANSWER, ONE_ANSWER) != BOTH
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        refusal(TWO, ONE_ANSWER, tool("?", tool_call_id="three"))


def test_errors_say_what_to_do():
    place = (
        "results stand before the next assistant message, so put .*'tool_call_id': …"
    )
    told = refusal(TWO, TWO_ANSWER)
    assert re.search(rf"{place}.* behind message 1 \(tool\)", told)
    told = refusal(user("Go"), TWO, assistant("wait"), ONE_ANSWER, TWO_ANSWER)
    assert re.search(rf"{place}.* behind message 1 \(assistant\)", told)
