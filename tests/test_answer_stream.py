"""Answers told apart as they arrive: by mlx-lm's own machine, its server, and in Python."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from timeit import repeat
from typing import Any

import pytest
from answer_shapes import (
    LENGTH,
    SHAPES,
    SPELLED,
    STOP,
    Pieces,
    Shape,
    argument,
    asked,
    call,
    closed,
    ids_of,
    opened,
    random_shape,
    read,
    section,
)
from mlx_lm.generate import TextStateMachine, make_text_state_machine
from mlx_lm.server import ToolCallFormatter
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from serving import MODEL, ScriptedModel, Server, serve_script

from kimi_k3 import read_answer
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.tokenizer.answer import Answer
from kimi_k3.tokenizer.decoded import DecodedText
from kimi_k3.tokenizer.files import MARKERS
from kimi_k3.tokenizer.prompt import Piece
from kimi_k3.tokenizer.xtml import CLOSE, OPEN, SEP

TOKENIZER: TokenizerWrapper = load_tokenizer(NANO_FOLDER)

RANDOM = [random_shape(seed) for seed in range(90)]


@dataclass
class Reply:
    """What a client of mlx-lm's server gets: deltas of a stream, or one with all."""

    finish: str = ""
    deltas: list[Answer] = field(default_factory=list)
    #: How many chunks had come when each of them was sent.
    places: list[int] = field(default_factory=list)

    @property
    def whole(self) -> Answer:
        calls = [call for delta in self.deltas for call in delta.tool_calls]
        reasoning = "".join(delta.reasoning for delta in self.deltas)
        return Answer(reasoning, "".join(d.content for d in self.deltas), calls)


def serve(
    shape: Shape,
    *,
    streamed: bool,
    together: int = 1,
    letters: bool = False,
    stop: tuple[str, ...] = (),
) -> Reply:
    """``shape`` through mlx-lm's pieces, put together as its server does.

    ``together``: ids that arrive at once.
    """
    formatter = ToolCallFormatter(TOKENIZER.tool_parser, shape.tools, streamed)
    state = make_text_state_machine(TOKENIZER, stop).make_state(
        "reasoning" if shape.thinking else "normal"
    )
    before = state[0]
    texts = {"reasoning": "", "normal": "", "tool": ""}
    calls: list[str] = []
    reply, called, now = Reply(), False, before
    for place, (text, finish) in enumerate(_segments(shape, together, letters), 1):
        segments: list[tuple[Any, str]]
        if finish == STOP:
            state, now = TextStateMachine.discard(state)
            segments = [(now, "")]
        else:
            state, segments = TextStateMachine.split(state, text)
        if finish == LENGTH:
            state, rest, now = TextStateMachine.flush(state)
            segments = [*segments, (now, rest)]
        for now, part in segments:
            if now == "normal" and before == "tool":
                calls.append(texts["tool"])
                texts["tool"], called = "", True
            if now in texts:
                texts[now] += part
            before = now
        if finish and before == "tool" and texts["tool"]:
            calls.append(texts["tool"])
            called = True
        if finish or (streamed and before != "tool"):
            told = [_call(found) for found in formatter(calls)]
            reply.deltas.append(Answer(texts["reasoning"], texts["normal"], told))
            reply.places.append(place)
            texts |= {"reasoning": "", "normal": ""}
            calls = []
        if finish:
            reply.finish = "tool_calls" if finish == STOP and called else finish
    return reply


def _segments(
    shape: Shape, together: int, letters: bool
) -> Iterator[tuple[str, str | None]]:
    """Texts as mlx-lm's detokenizer shows them, and why the last is the last."""
    ids = ids_of(TOKENIZER, shape.pieces, letters=letters)
    detokenizer = TOKENIZER.detokenizer
    waiting = ""
    for place, token_id in enumerate(ids, start=1):
        detokenizer.add_token(token_id)
        waiting += detokenizer.last_segment
        if place % together == 0:
            yield waiting, None
            waiting = ""
    detokenizer.finalize()
    waiting += detokenizer.last_segment
    if shape.finish == LENGTH:
        yield waiting, LENGTH
    else:
        yield waiting, None
        yield "", STOP


def _call(found: dict[str, Any]) -> dict[str, Any]:
    """A call of a reply as ``read_answer`` gives it; its arguments are strict JSON."""
    function = found["function"]
    arguments = json.loads(function["arguments"], parse_constant=pytest.fail)
    return {"name": function["name"], "arguments": arguments}


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_told_apart(name: str):
    shape = SHAPES[name]
    for letters in (False, True):
        assert read(TOKENIZER, shape, letters=letters) == shape.said
        for together in (2, 10_000) if letters else (1, 2, 3, 7):
            for streamed in (False, True):
                reply = serve(
                    shape, streamed=streamed, together=together, letters=letters
                )
                assert reply.whole == shape.said
                assert (reply.finish == LENGTH) == (shape.finish == LENGTH)
                if shape.said.tool_calls and shape.finish == STOP:
                    assert reply.finish == "tool_calls"


@pytest.mark.parametrize("part", range(0, len(RANDOM), 30))
def test_random_answers(part: int):
    for seed, shape in enumerate(RANDOM[part : part + 30], start=part):
        together = 1 + seed % 5
        letters = seed % 7 == 0
        assert read(TOKENIZER, shape, letters=letters) == shape.said, seed
        streamed = seed % 2 == 0
        reply = serve(shape, streamed=streamed, together=together, letters=letters)
        assert reply.whole == shape.said, seed


def test_random_answers_hold_what_is_looked_for():
    said = [shape.said for shape in RANDOM]
    assert sum(len(one.tool_calls) > 1 for one in said) > 20
    assert sum(SPELLED in one.reasoning for one in said) > 10
    assert sum(SPELLED in one.content for one in said) > 10
    assert sum(SPELLED in repr(one.tool_calls) for one in said) > 10
    assert {(s.thinking, s.finish) for s in RANDOM} == {
        (thinking, finish) for thinking in (False, True) for finish in (STOP, LENGTH)
    }


@pytest.mark.parametrize("name", ["text and calls", "think closed without sep, calls"])
def test_cut_anywhere(name: str):
    """What was said up to there stays where it was said, and calls that were whole."""
    whole = SHAPES[name]
    ids = ids_of(TOKENIZER, whole.pieces)
    marks = {piece.text for piece in whole.pieces if piece.control}
    seen = set()
    for stop in range(len(ids)):
        said = read_answer(TOKENIZER, ids[:stop])
        assert whole.said.reasoning.startswith(said.reasoning)
        assert whole.said.content.startswith(said.content)
        count = len(said.tool_calls)
        assert said.tool_calls == whole.said.tool_calls[:count]
        assert not any(mark in said.reasoning + said.content for mark in marks)
        seen.add(count)
        cut = Shape(_decoded_pieces(ids[:stop]), said, finish=LENGTH)
        assert serve(cut, streamed=stop % 2 == 0).whole == said
    assert seen == set(range(len(whole.said.tool_calls) + 1))


def _decoded_pieces(ids: list[int]) -> Pieces:
    """Pieces whose ids are ``ids`` one by one."""
    first = min(TOKENIZER.all_special_ids)
    return [Piece(TOKENIZER.decode([i]), control=i >= first) for i in ids]


def test_a_call_arrives_when_it_closes():
    """B25: a long argument is one delta, but it waits for nothing that comes after it."""
    calls = [
        asked(f"f{n}", text='"Line"\n' * count) for n, count in enumerate((500, 9, 9))
    ]
    pieces = [Piece("R"), *closed("think"), *section("response", "A"), *opened("tools")]
    arrived = []
    for one in calls:
        pieces += call(one["name"], argument("text", one["arguments"]["text"]))
        arrived.append(len(ids_of(TOKENIZER, pieces)))
    assert arrived[0] > 2000
    shape = Shape([*pieces, *closed("tools")], Answer("R", "A", calls))
    reply = serve(shape, streamed=True)
    told = [(n, d) for n, d in enumerate(reply.deltas) if d != Answer()]
    assert [d for _, d in told] == [
        *(Answer("R"), Answer("", "A")),
        *(Answer(tool_calls=[one]) for one in calls),
    ]
    # The next delta after the id that closes it: in a call, mlx-lm sends none.
    assert [reply.places[n] for n, _ in told[2:]] == arrived


@pytest.mark.parametrize("word", ["four", "<|close|>", "</x>", "\n\n"])
def test_a_stop_word_is_left_out_of_text_and_spares_structure(word: str):
    """mlx-lm gives stop words to the same machine; it strips them where they are text."""
    shape = SHAPES["regular"]
    said = f"a {word} b"
    pieces = [Piece("R"), *closed("think"), *section("response", said)]
    reply = serve(replace(shape, pieces=pieces), streamed=True, stop=(word,))
    assert reply.whole == Answer("R", said if "|" in word else "a  b", [])


def test_both_end_ids_and_what_follows_them_are_left_out():
    ids = ids_of(TOKENIZER, SHAPES["regular"].pieces)
    for end in TOKENIZER.end_ids:
        for rest in ([], TOKENIZER.encode(" and more"), [end]):
            said = read_answer(TOKENIZER, [*ids, end, *rest])
            assert said == SHAPES["regular"].said
            text = TOKENIZER.decode([*ids, end, *rest])
            assert read_answer(TOKENIZER, text) == said


def test_text_of_mlx_lm_is_read_like_ids():
    """``mlx_lm.generate`` adds up the segments of a detokenizer."""
    for shape in [*SHAPES.values(), *RANDOM[:20]]:
        text = ""
        for segment, _ in _segments(shape, 1, False):
            text += segment
        assert isinstance(text, DecodedText) or not text
        assert read_answer(TOKENIZER, text, thinking=shape.thinking) == shape.said


def test_an_ordinary_string_is_read_by_its_markers():
    for name, shape in SHAPES.items():
        if "spelled" not in name:
            pieces = [piece for piece in shape.pieces if piece.text != "[PAD]"]
            text = str.__str__(TOKENIZER.decode(ids_of(TOKENIZER, pieces)))
            assert read_answer(TOKENIZER, text, thinking=shape.thinking) == shape.said


#: Through the server itself: a shape of each kind that was reported from elsewhere.
SERVED = (
    *("regular", "text and calls", "cut in the third call", "call without tools"),
    # B03: whole answers that vanished into reasoning, calls that were lost.
    *("think closed without sep", "response inside think", "tools inside think"),
    # B13: thinking that was cut taken for the answer.
    *("cut in think", "cut in content"),
    # B15: the end of the message shown.
    "message closed instead of response",
    *("markers spelled in response", "markers spelled in an argument"),
)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    answers = [ids_of(TOKENIZER, SHAPES[name].pieces) for name in SERVED]
    with serve_script(ScriptedModel(TOKENIZER, answers), TOKENIZER) as server:
        yield server


def ask(
    server: Server,
    name: str,
    *,
    streamed: bool,
    question: str = SPELLED,
    **options: Any,
) -> Reply:
    """The answer ``name`` as OpenAI's client gets it; no tools are declared (B12)."""
    shape, number = SHAPES[name], SERVED.index(name)
    limit = len(ids_of(TOKENIZER, shape.pieces)) if shape.finish == LENGTH else 400
    given: Any = server.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": f"{question} script {number}"}],
        max_tokens=limit,
        stream=streamed,
        extra_body={"chat_template_kwargs": {"thinking": shape.thinking}},
        **options,
    )
    reply = Reply()
    parts: list[Any] = list(given) if streamed else [given]
    for part in parts:
        (choice,) = part.choices
        message = choice.delta if streamed else choice.message
        calls = [_call(found.model_dump()) for found in message.tool_calls or ()]
        reasoning = getattr(message, "reasoning", None)
        assert message.content != "", "what was not said is null"
        assert reasoning != ""
        reply.deltas.append(Answer(reasoning or "", message.content or "", calls))
        reply.finish = choice.finish_reason or reply.finish
    return reply


@pytest.mark.parametrize("options", [{}, {"seed": 7}], ids=["batched", "alone"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", SERVED)
def test_the_server_gives_the_same(server, name: str, streamed: bool, options: Any):
    """A request with a seed is served by other code of mlx-lm's than one without."""
    shape = SHAPES[name]
    reply = ask(server, name, streamed=streamed, **options)
    assert reply.whole == shape.said
    if shape.finish == LENGTH:
        assert reply.finish == LENGTH
    else:
        assert reply.finish == ("tool_calls" if shape.said.tool_calls else STOP)
    if streamed:
        # B25: a call is not kept until the section ends.
        assert all(len(delta.tool_calls) < 2 for delta in reply.deltas)


@pytest.mark.parametrize("name", ["cut in think", "cut in content", "regular"])
@pytest.mark.parametrize("tag", [opened("think"), closed("think")])
def test_what_a_user_says_does_not_begin_the_answer(server, name: str, tag: Pieces):
    """B27: neither in the last message nor, as here, as the last thing in it."""
    text = "".join(piece.text for piece in tag)
    reply = ask(server, name, streamed=False, question=text * 2)
    assert reply.whole == SHAPES[name].said


def test_control_ids_before_the_end_of_a_prompt_do_not_begin_the_answer(server):
    """B27, of a conversation that is written by hand: markers in it are control ids."""
    name = "cut in content"
    pieces = [
        *opened("message", ' role="user"'),
        *opened("think"),
        Piece(f"script {SERVED.index(name)}"),
        *closed("message"),
        *opened("message", ' role="assistant"'),
        *opened("response"),
    ]
    prompt = "".join(piece.text for piece in pieces)
    limit = len(ids_of(TOKENIZER, SHAPES[name].pieces))
    given = server.client().completions.create(
        model=MODEL, prompt=prompt, max_tokens=limit
    )
    assert ids_of(TOKENIZER, opened("think"))[0] in TOKENIZER.encode(prompt)
    assert given.choices[0].text == SHAPES[name].said.content


def test_the_time_of_reading_grows_with_the_answer():
    few, many = (
        min(repeat(partial(read_answer, TOKENIZER, text), repeat=3, number=1))
        for text in (DecodedText.of([SEP] * count) for count in (4000, 16_000))
    )
    assert many < 9 * few


def test_no_answer_leaks_a_marker_or_depends_on_how_it_comes():
    """Control ids in any order: tags without names, ends without beginnings."""
    draw = random.Random(8)
    tags = ("think", "response", "tools", "call", "argument", "json", "message", "odd")
    words = (*tags, ' tool="f" index="1"', ' key="a" type="string"', "Hm.", "\n", "1")
    parts: Pieces = [OPEN, CLOSE, SEP, Piece("[PAD]", control=True), *map(Piece, words)]
    parts += [OPEN, CLOSE, SEP]
    calls = 0
    for number in range(150):
        pieces = draw.choices(parts, k=draw.randrange(30))
        for _ in range(draw.randrange(3)):
            place = draw.randrange(len(pieces) + 1)
            pieces[place:place] = call("f", argument("a", SPELLED))
        thinking = draw.random() < 0.5
        said = read(TOKENIZER, Shape(pieces, Answer(), thinking=thinking))
        # No text of these says it: a marker in it is one that was not taken out.
        for text in (said.reasoning, said.content):
            text = text.replace(SPELLED, "")
            assert not any(name in text for name in (*MARKERS, "[PAD]"))
        for finish in (STOP, LENGTH):
            shape = Shape(pieces, said, thinking=thinking, finish=finish)
            reply = serve(shape, streamed=number % 2 == 0, together=1 + number % 4)
            assert reply.whole == said, pieces
        calls += len(said.tool_calls)
    assert calls > 25
