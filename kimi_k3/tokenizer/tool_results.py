"""Which call each tool result answers.

K3 reads a result with the name and the number of its call; OpenAI's clients send the
call's id, or nothing, in any order. Results belong to the calls of the last assistant
message. What cannot be told for certain is refused: a result under another call's name
would be believed.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, zip_longest

from ..errors import ChatError
from .messages import Message, ToolCall

#: Index of a result's message → the place of its call, from 0.
Places = dict[int, int]


def pair_results(messages: Sequence[Message], *, reply: bool = False) -> list[Message]:
    """``messages`` with every tool result named and numbered after its call.

    Results next to each other come in the order of their calls. ``reply`` says that the
    model is asked for the next message, so that no call may be left without a result.
    Raises ChatError naming the id, or the message, that does not fit.
    """
    paired: list[Message] = []
    older: dict[str, int] = {}
    turns = list(_turns(messages))
    for number, turn in enumerate(turns, start=1):
        goes_on = number < len(turns) or reply or any(m.role == "user" for m in turn)
        paired += _paired(turn, older, goes_on)
        older |= {
            call.call_id: turn[0].index
            for call in turn[0].tool_calls
            if call.call_id is not None
        }
    return paired


def _turns(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Parts of a conversation that each begin with an assistant message, or at all."""
    turn: list[Message] = []
    for message in messages:
        if message.role == "assistant" and turn:
            yield turn
            turn = []
        turn.append(message)
    yield turn


def _paired(
    turn: list[Message], older: Mapping[str, int], goes_on: bool
) -> list[Message]:
    first = turn[0]
    results = [message for message in turn if message.role == "tool"]
    places = _by_id(first, results, older)
    if first.tool_calls:
        _by_name_and_order(first, results, places)
        if results or goes_on:
            _check_all_answered(turn, places)
    else:
        places = _uncalled(results)
    calls = first.tool_calls
    found: list[Message] = []
    for is_run, run in groupby(turn, key=lambda message: message.role == "tool"):
        if not is_run:
            found += run
            continue
        for message in sorted(run, key=lambda message: places[message.index]):
            place = places[message.index]
            tool = calls[place].name if calls else message.tool
            found.append(replace(message, tool=tool, tool_index=place + 1))
    return found


def _by_id(
    first: Message, results: Sequence[Message], older: Mapping[str, int]
) -> Places:
    """Places of the results that carry an id."""
    named: dict[str, list[int]] = {}
    for place, call in enumerate(first.tool_calls):
        if call.call_id is not None:
            named.setdefault(call.call_id, []).append(place)
    places: Places = {}
    answered: dict[str, int] = {}
    for result in results:
        call_id = result.call_id
        if call_id is None and result.own_id in named:
            call_id = result.own_id
        if call_id is None:
            continue
        where = f"message {result.index} is a tool result for tool_call_id {call_id!r}"
        if call_id not in named:
            raise ChatError(
                f"{where}, which is {_what_else(first, call_id, older)}; results follow "
                "the assistant message that makes their calls."
            )
        if call_id in answered:
            raise ChatError(
                f"{where}, which message {answered[call_id]} answers already; keep one "
                "result for each call."
            )
        if len(named[call_id]) > 1:
            raise ChatError(
                f"{where}, which {len(named[call_id])} calls of message {first.index} "
                "share; give every call an id of its own."
            )
        answered[call_id] = result.index
        places[result.index] = named[call_id][0]
    return places


def _what_else(first: Message, call_id: str, older: Mapping[str, int]) -> str:
    if call_id in older:
        before = f"a call of message {older[call_id]}, before "
    else:
        before = "no call of "
    if first.role != "assistant":
        return f"{before}any assistant message"
    known = [repr(call.call_id) for call in first.tool_calls if call.call_id]
    calls = f"calls {', '.join(known)}" if known else "calls without ids"
    if not first.tool_calls:
        calls = "no calls"
    return f"{before}the last assistant message (message {first.index}, with {calls})"


def _by_name_and_order(
    first: Message, results: Sequence[Message], places: Places
) -> None:
    """Add to ``places`` the results without ids: by name if that is plain, else in order.

    A name is plain if as many results bear it as calls of it are open. Beside results
    with ids, which come in any order, order tells nothing.
    """
    calls = first.tool_calls
    taken = {*places.values()}
    in_order = not taken
    open_calls = [place for place in range(len(calls)) if place not in taken]
    rest = [result for result in results if result.index not in places]
    for name in dict.fromkeys(result.tool for result in rest if result.tool):
        bearers = [result for result in rest if result.tool == name]
        fitting = [place for place in open_calls if calls[place].name == name]
        if not fitting:
            raise ChatError(_misfit(bearers[0], first, open_calls))
        if len(bearers) == len(fitting) and (in_order or len(bearers) == 1):
            places |= {
                result.index: place
                for result, place in zip(bearers, fitting, strict=True)
            }
            rest = [result for result in rest if result not in bearers]
            open_calls = [place for place in open_calls if place not in fitting]
    if rest and len(open_calls) > 1 and not in_order:
        raise ChatError(_misfit(rest[0], first, open_calls))
    for result, place in zip_longest(rest, open_calls):
        if result is None:
            break
        if place is None or result.tool not in (None, calls[place].name):
            raise ChatError(_misfit(result, first, open_calls))
        places[result.index] = place


def _misfit(result: Message, first: Message, open_calls: Sequence[int]) -> str:
    of = f" of {result.tool!r}" if result.tool else ""
    waiting = ", ".join(_told(first.tool_calls, place) for place in open_calls)
    return (
        f"message {result.index} is a tool result{of} without a tool_call_id, and none "
        f"of message {first.index}'s calls can be told to be its own (waiting: "
        f"{waiting or 'none'}); give it 'tool_call_id'."
    )


def _check_all_answered(turn: Sequence[Message], places: Places) -> None:
    """Calls without ids may have no results at all, as in chats written for training."""
    first, last = turn[0], turn[-1]
    answered = {*places.values()}
    missing = [
        _told(first.tool_calls, place)
        for place, call in enumerate(first.tool_calls)
        if place not in answered and (call.call_id is not None or places)
    ]
    if missing:
        raise ChatError(
            f"message {first.index} calls tools, but no tool result follows for "
            f"{', '.join(missing)}; results stand before the next assistant message, so "
            "put {'role': 'tool', 'tool_call_id': …, 'content': …} behind message "
            f"{last.index} ({last.role})."
        )


def _told(calls: Sequence[ToolCall], place: int) -> str:
    call = calls[place]
    of = f"{call.call_id!r}, " if call.call_id is not None else ""
    return f"{of}call {place} ({call.name})"


def _uncalled(results: Sequence[Message]) -> Places:
    """Results after a message without calls: in order, under the names they bring."""
    for result in results:
        if not result.tool:
            raise ChatError(
                f"message {result.index} is a tool result that no tool call before it "
                "asked for; give it 'name', or 'tool_call_id' of a call."
            )
    return {result.index: place for place, result in enumerate(results)}
