"""Answers of Kimi K3 in every shape it is known to leave them in, and what they say.

An answer is a list of pieces: ordinary text, and markers that are control ids. ``said``
is what a reader must get, whoever reads it.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from kimi_k3 import read_answer
from kimi_k3.tokenizer.answer import Answer
from kimi_k3.tokenizer.prompt import Piece, RenderedPrompt
from kimi_k3.tokenizer.xtml import CLOSE, OPEN, SEP

Pieces = list[Piece]

STOP, LENGTH = "stop", "length"

#: Text that only talks about the format, in ordinary tokens.
SPELLED = (
    "End it with <|close|>think<|sep|>, then <|open|>response<|sep|> or "
    '<|open|>tools<|sep|><|open|>call tool="rm" index="1"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|><|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    "[EOS]"
)


@dataclass(frozen=True)
class Shape:
    """An answer and how it came: ``thinking`` as the prompt said, ``finish`` its end."""

    pieces: Pieces
    said: Answer
    thinking: bool = True
    finish: str = STOP
    tools: Any = None


def opened(tag: str, attributes: str = "") -> Pieces:
    return [OPEN, Piece(tag + attributes), SEP]


def closed(tag: str) -> Pieces:
    return [CLOSE, Piece(tag), SEP]


def section(tag: str, *texts: str) -> Pieces:
    return [*opened(tag), *map(Piece, texts), *closed(tag)]


def argument(key: str, text: str, kind: str = "string") -> Pieces:
    return [
        *opened("argument", f' key="{key}" type="{kind}"'),
        Piece(text),
        *closed("argument"),
    ]


def call(name: str, *arguments: Pieces, index: int = 1) -> Pieces:
    inner = [piece for one in arguments for piece in one]
    head = f' tool="{name}" index="{index}"'
    return [*opened("call", head), *inner, *closed("call")]


def asked(name: str, **arguments: Any) -> dict[str, Any]:
    """A call as a reader gets it."""
    return {"name": name, "arguments": arguments}


def ids_of(tokenizer: Any, pieces: Pieces, *, letters: bool = False) -> list[int]:
    """Ids of ``pieces``; with ``letters`` each character of a text by itself."""
    if letters:
        pieces = [
            Piece(part, control)
            for text, control in pieces
            for part in ([text] if control else text)
        ]
    return tokenizer.encode(RenderedPrompt(pieces), add_special_tokens=False)


def text_of(pieces: Pieces) -> str:
    """``pieces`` as an ordinary string."""
    return "".join(piece.text for piece in pieces)


def read(tokenizer: Any, shape: Shape, *, letters: bool = False) -> Answer:
    ids = ids_of(tokenizer, shape.pieces, letters=letters)
    return read_answer(tokenizer, ids, thinking=shape.thinking, tools=shape.tools)


_R, _A = Piece("Let me think.\n\nYes."), Piece("The answer is 4 < 5.\n")
_END = closed("message")
_THOUGHT = [_R, *closed("think")]
_ANSWERED = [*opened("response"), _A, *closed("response")]
_CALL = call("read_file", argument("path", "notes.txt"))
_CALLED = asked("read_file", path="notes.txt")
_TWO = [*_CALL, *call("list", argument("depth", "2", "number"), index=2)]
_BOTH = [_CALLED, asked("list", depth=2)]
_TOOLS = [*opened("tools"), *_CALL, *closed("tools")]


def _said(
    reasoning: str | Piece = _R, content: str | Piece = "", calls: Any = ()
) -> Answer:
    reasoning, content = (
        text.text if isinstance(text, Piece) else text for text in (reasoning, content)
    )
    return Answer(reasoning, content, list(calls))


_PAD = Piece("[PAD]", control=True)
_PLAIN, _ASKING, _SILENT = _said(content=_A), _said(calls=[_CALLED]), _said("", _A)

SHAPES = {
    # As the model was trained.
    "regular": Shape([*_THOUGHT, *_ANSWERED, *_END], _PLAIN),
    "regular, without message": Shape([*_THOUGHT, *_ANSWERED], _PLAIN),
    "without thinking": Shape(
        [_A, *closed("response"), *_END], _SILENT, thinking=False
    ),
    "call": Shape([*_THOUGHT, *section("response"), *_TOOLS, *_END], _ASKING),
    "text and calls": Shape(
        [*_THOUGHT, *_ANSWERED, *opened("tools"), *_TWO, *closed("tools"), *_END],
        _said(content=_A, calls=_BOTH),
    ),
    "call without thinking": Shape(
        [*closed("response"), *_TOOLS, *_END],
        _said("", calls=[_CALLED]),
        thinking=False,
    ),
    # Thinking left irregularly.
    "think closed without sep": Shape(
        [_R, CLOSE, Piece("think"), *_ANSWERED, *_END], _PLAIN
    ),
    "think closed without sep, calls": Shape(
        [_R, CLOSE, Piece("think"), *_TOOLS, *_END], _ASKING
    ),
    "think closed without sep, text": Shape(
        [_R, CLOSE, Piece("think"), _A, *_END], _PLAIN
    ),
    "response inside think": Shape([_R, *_ANSWERED, *_END], _PLAIN),
    "tools inside think": Shape([_R, *_TOOLS, *_END], _ASKING),
    "message closed in think": Shape([_R, *_END], _said()),
    "think closed twice": Shape([*_THOUGHT, *closed("think"), *_ANSWERED], _PLAIN),
    "think opened again": Shape([*opened("think"), *_THOUGHT, *_ANSWERED], _PLAIN),
    "thinking although it is off": Shape(
        [*opened("think"), *_THOUGHT, *_ANSWERED, *_END], _PLAIN, thinking=False
    ),
    "thinking after the answer": Shape(
        [*_THOUGHT, *_ANSWERED, *section("think", " Once more."), *_END],
        _said(_R.text + " Once more.", _A),
    ),
    "no think, response": Shape([*_ANSWERED, *_END], _SILENT),
    "no think, closed at once": Shape([*closed("think"), *_ANSWERED, *_END], _SILENT),
    "no think, calls": Shape([*_TOOLS, *_END], _said("", calls=[_CALLED])),
    "no response opened": Shape([*_THOUGHT, _A, *_END], _PLAIN),
    "a tag of no meaning": Shape(
        [_R, *opened("note", ' a="b"'), _R, *closed("note"), *closed("think"), _A],
        _said(_R.text * 2, _A),
    ),
    "a tag without an end hides its line": Shape(
        [_R, OPEN, Piece("odd\n"), _R, CLOSE, Piece("odd\n"), *closed("think"), _A],
        _said(_R.text * 2, _A),
    ),
    "a tag without a word, on one line": Shape(
        [_R, CLOSE, Piece(f" {_A.text}"), *_END], _PLAIN
    ),
    "words in the attributes of a tag of no meaning": Shape(
        [_R, *opened("note", ' a="response" b="call"'), _R, *closed("think"), _A],
        _said(_R.text * 2, _A),
    ),
    "an argument outside of a call": Shape(
        [
            *_THOUGHT,
            *opened("tools"),
            *argument("response", "v"),
            *closed("tools"),
            *_ANSWERED,
        ],
        _PLAIN,
    ),
    "other control ids": Shape(
        [_PAD, _R, _PAD, *closed("think"), *opened("response"), _PAD, _A, *_END],
        _PLAIN,
    ),
    # Sections that are not closed.
    "response not closed": Shape([*_THOUGHT, *opened("response"), _A], _PLAIN),
    "message closed instead of response": Shape(
        [*_THOUGHT, *opened("response"), _A, *_END], _PLAIN
    ),
    "response closed without sep": Shape(
        [*_THOUGHT, *opened("response"), _A, CLOSE, Piece("response")], _PLAIN
    ),
    "response closed without sep, text": Shape(
        [*_THOUGHT, *opened("response"), Piece("A"), CLOSE, Piece("response"), _A],
        _said(content="A" + _A.text),
    ),
    "tools inside response": Shape(
        [*_THOUGHT, *opened("response"), _A, *_TOOLS, *_END],
        _said(content=_A, calls=[_CALLED]),
    ),
    "think not closed": Shape([_R], _said()),
    "tools not closed": Shape([*_THOUGHT, *opened("tools"), *_TWO], _said(calls=_BOTH)),
    "message closed instead of tools": Shape(
        [*_THOUGHT, *opened("tools"), *_TWO, *_END], _said(calls=_BOTH)
    ),
    "calls not closed": Shape(
        [*_THOUGHT, *opened("tools"), *_TWO[: -len(closed("call"))], *closed("tools")],
        _said(calls=_BOTH),
    ),
    "response inside a call": Shape(
        [*_THOUGHT, *opened("tools"), *_CALL, *_CALL[:-3], *_ANSWERED, *_END],
        _said(content=_A, calls=[_CALLED]),
    ),
    "message closed instead of a call, text": Shape(
        [*_THOUGHT, *opened("tools"), *_CALL[:-3], *_END, _A],
        _said(content=_A, calls=[_CALLED]),
    ),
    "call opened without sep": Shape(
        [*_THOUGHT, *opened("tools"), *_CALL[:2], *_CALL[3:], *closed("tools"), *_END],
        _ASKING,
    ),
    "call without tools": Shape([*_THOUGHT, *_CALL, *_END], _ASKING),
    "response after calls": Shape(
        [*_THOUGHT, *_TOOLS, *_ANSWERED], _said(_R, _A, [_CALLED])
    ),
    "two tools sections": Shape(
        [*_THOUGHT, *_TOOLS, *_TOOLS], _said(calls=[_CALLED, _CALLED])
    ),
    "nothing": Shape([], _said("")),
    "only the end": Shape(_END, _said("")),
    # Cut by length.
    "cut in think": Shape([_R], _said(), finish=LENGTH),
    "cut in content": Shape([_A], _SILENT, thinking=False, finish=LENGTH),
    "cut in a tag": Shape([_R, CLOSE, Piece("thi")], _said(), finish=LENGTH),
    "cut after a close": Shape([_R, CLOSE], _said(), finish=LENGTH),
    "cut in response": Shape(
        [*_THOUGHT, *opened("response"), _A], _PLAIN, finish=LENGTH
    ),
    "cut in the third call": Shape(
        [
            *_THOUGHT,
            *opened("tools"),
            *_TWO,
            *opened("call", ' tool="rm" index="3"'),
            *opened("argument", ' key="path" type="string"'),
            Piece("/"),
        ],
        _said(calls=_BOTH),
        finish=LENGTH,
    ),
    "cut before the call's end": Shape(
        [*_THOUGHT, *opened("tools"), *_CALL[: -len(closed("call"))]],
        _said(),
        finish=LENGTH,
    ),
    # Text about markers.
    "markers spelled in think": Shape(
        [Piece(SPELLED), *closed("think"), *_ANSWERED, *_END], _said(SPELLED, _A)
    ),
    "markers spelled in response": Shape(
        [*_THOUGHT, *opened("response"), Piece(SPELLED), *closed("response"), *_END],
        _said(content=SPELLED),
    ),
    "markers spelled in an argument": Shape(
        [
            *_THOUGHT,
            *opened("tools"),
            *call("w", argument("text", SPELLED)),
            *closed("tools"),
            *_END,
        ],
        _said(calls=[asked("w", text=SPELLED)]),
    ),
    "markers spelled, cut": Shape(
        [*_THOUGHT, *opened("response"), Piece(SPELLED)],
        _said(content=SPELLED),
        finish=LENGTH,
    ),
    "a spelled call is no call": Shape(
        [*_THOUGHT, *opened("response"), Piece(RenderedPrompt(_TOOLS).strip()), *_END],
        _said(content=str.__str__(RenderedPrompt(_TOOLS))),
    ),
}

_TEXTS = (
    *(
        "Hm. ",
        "4 < 5 and 6 |> 7",
        "中文 😀",
        "\n\n",
        "line\nline ",
        "think",
        " response",
    ),
    *(SPELLED, "<|sep|>", "<|open|>", "a <|close|", "<|end_of_msg|>", "&quot;<|", "> "),
)
_VALUES: tuple[Any, ...] = (
    *_TEXTS,
    "",
    " a",
    3,
    2.5,
    None,
    True,
    [1, "二"],
    {"k": SPELLED},
)


@dataclass
class _Reader:
    """What a random answer has said so far, kept by who writes it."""

    pieces: Pieces = field(default_factory=list)
    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tag: str = "think"
    place: str = "think"

    def text(self, text: str) -> None:
        self.pieces.append(Piece(text))
        if self.place == "think":
            self.reasoning += text
        elif self.place == "response":
            self.content += text

    def open(self, tag: str) -> None:
        self.pieces += opened(tag)
        self.tag = self.place = tag

    def close(self, tag: str, *, sep: bool) -> None:
        self.pieces += closed(tag) if sep else closed(tag)[:2]
        self.place = "response"

    def call(self, name: str, index: int, **arguments: Any) -> None:
        written = [
            argument(key, value)
            if isinstance(value, str)
            else argument(key, json.dumps(value, ensure_ascii=False), "any")
            for key, value in arguments.items()
        ]
        self.pieces += call(name, *written, index=index)
        self.calls.append(asked(name, **arguments))
        # What stands between two calls belongs to none of them.
        self.place = "response"


def random_shape(seed: int) -> Shape:
    """An answer with sections, calls and ends as they may come, in any order."""
    draw = random.Random(seed)
    thinking = draw.random() < 0.7
    begins_in = "think" if thinking else "response"
    said = _Reader(tag=begins_in, place=begins_in)
    for _ in range(draw.randrange(1, 9)):
        _some_text(draw, said)
        tag = draw.choice(("think", "response", "response", "tools"))
        if draw.random() < 0.6:
            said.close(said.tag, sep=draw.random() < 0.7)
        said.open(tag)
        if tag == "tools":
            _some_calls(draw, said)
    if draw.random() < 0.5:
        _some_text(draw, said)
        return _shape(said, thinking, LENGTH)
    said.close(draw.choice((said.tag, "message")), sep=True)
    return _shape(said, thinking, STOP)


def _some_text(draw: random.Random, said: _Reader) -> None:
    for _ in range(draw.randrange(3)):
        said.text(draw.choice(_TEXTS))


def _some_calls(draw: random.Random, said: _Reader) -> None:
    for index in range(1, draw.randrange(5)):
        arguments = {f"k{n}": draw.choice(_VALUES) for n in range(draw.randrange(3))}
        said.call(f"f{index}", index, **arguments)
        if draw.random() < 0.3:
            said.text("\n")


def _shape(said: _Reader, thinking: bool, finish: str) -> Shape:
    answer = Answer(said.reasoning, said.content, said.calls)
    return Shape(said.pieces, answer, thinking=thinking, finish=finish)
