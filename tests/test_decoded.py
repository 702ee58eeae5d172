"""Decoded text keeps what it knows of control ids, and hosts can match only those."""

import copy
import pickle
import random
from typing import Any

import pytest
from answer_shapes import SPELLED, closed, ids_of, opened
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer

from kimi_k3.nano import NANO_FOLDER
from kimi_k3.tokenizer.decoded import (
    OTHER_CONTROL,
    DecodedText,
    Ranges,
    control_characters,
)
from kimi_k3.tokenizer.prompt import Piece, RenderedPrompt
from kimi_k3.tokenizer.xtml import CLOSE, OPEN, SEP

TOKENIZER: TokenizerWrapper = load_tokenizer(NANO_FOLDER)

#: ``a<|open|>b`` by control id, and then spelled.
TEXT: Any = DecodedText.of([("a", False), OPEN, ("b<|open|>c", False)])

#: One character a letter of text, a whole name for a control id: what must be kept.
Model = list[str]


def model_of(text: Any) -> Model:
    """What ``text`` says of itself, read from its public attributes only."""
    units, place = [], 0
    for start, stop in text.controls:
        units += [*str.__str__(text)[place:start], str.__str__(text)[start:stop]]
        place = stop
    return [*units, *str.__str__(text)[place:]]


def test_it_is_its_text():
    plain = "a<|open|>b<|open|>c"
    assert plain == TEXT
    assert hash(TEXT) == hash(plain)
    assert {plain: 1}[TEXT] == 1
    assert TEXT.plain() == plain
    assert type(TEXT.plain()) is str
    assert (f"{TEXT}", str(TEXT), f"{TEXT:>2}") == (plain,) * 3
    assert TEXT.controls == ((1, 9),)
    assert (TEXT.find("<|open|>"), TEXT.count("<|open|>")) == (1, 2)
    assert "".join(TEXT) == plain
    assert TEXT.encode() == plain.encode()
    assert not DecodedText()
    assert DecodedText.of([]).controls == ()


def test_pieces_are_what_it_was_made_of():
    assert TEXT.pieces == (Piece("a"), OPEN, Piece("b<|open|>c"))
    assert TEXT[1:9].pieces == (OPEN,)
    assert DecodedText().pieces == ()
    assert DecodedText.of(TEXT.pieces).controls == TEXT.controls


def test_a_sum_with_a_prompt_is_a_prompt():
    """A prompt's texts are encoded one by one, so their ends must not be lost."""
    prompt = RenderedPrompt([SEP, Piece("x"), Piece("y")])
    for total, pieces in (
        (prompt + TEXT, prompt.pieces + TEXT.pieces),
        (TEXT + prompt, TEXT.pieces + prompt.pieces),
    ):
        assert isinstance(total, RenderedPrompt)
        assert total.pieces == pieces
    total = TEXT
    total += prompt
    assert isinstance(total, RenderedPrompt)


def test_part_of_a_control_name_is_text():
    assert TEXT[1:9].controls == ((0, 8),)
    assert TEXT[1:10].controls == ((0, 8),)
    assert TEXT[0:9].controls == ((1, 9),)
    for part in (TEXT[2:], TEXT[:8], TEXT[1:8], TEXT[5:5], TEXT[10:]):
        assert isinstance(part, DecodedText)
        assert part.controls == ()
    assert type(TEXT[::-1]) is type(TEXT[::2]) is str


class Counted(tuple):
    """Counts what is asked of it."""

    asked = 0

    def __getitem__(self, key: Any) -> Any:
        Counted.asked += 1
        return super().__getitem__(key)

    def __iter__(self) -> Any:
        Counted.asked += len(self)
        return super().__iter__()


def test_a_part_costs_what_it_is_long():
    """A host takes an answer of many control ids apart in as many slices."""
    text: Any = DecodedText.of([OPEN] * 20_000)
    ranges: Ranges = Counted(text.controls)
    text.controls = ranges
    for place in (0, 80_000, 8 * 20_000 - 16):
        Counted.asked = 0
        assert text[place : place + 16].controls == ((0, 8), (8, 16))
        assert 0 < Counted.asked < 100


def test_strips_take_nothing_else():
    text: Any = DecodedText.of(
        [(" \n", False), OPEN, (" x", False), SEP, ("  ", False)]
    )
    assert text.strip().controls == ((0, 8), (10, 17))
    assert text.lstrip().controls == ((0, 8), (10, 17))
    assert text.rstrip().controls == ((2, 10), (12, 19))
    assert text.removeprefix(" \n") == text[2:]
    assert text.removeprefix(" \n").controls == text.removesuffix("  ")[2:].controls
    assert text.strip().strip("<").controls == ((9, 16),)


def test_copies_and_pickles_know_the_same():
    for other in (
        copy.copy(TEXT),
        copy.deepcopy([TEXT])[0],
        *map(_pickled, range(2, 6)),
    ):
        assert type(other) is DecodedText
        assert (other, other.controls) == (TEXT, TEXT.controls)
    character: Any = pickle.loads(pickle.dumps(TEXT[1]))
    assert character == TEXT[1]
    assert character != "<"


def _pickled(protocol: int) -> DecodedText:
    return pickle.loads(pickle.dumps(TEXT, protocol))


def test_random_slices_sums_and_strips():
    """Against a list of units, of which slices take the whole ones."""
    draw = random.Random(2)
    units = ["a", " ", "\n", "<", "|", "<|open|>", "<|sep|>", "é", "[EOS]"]
    for _ in range(400):
        parts = [
            (unit, len(unit) > 1 and draw.random() < 0.7)
            for unit in draw.choices(units, k=draw.randrange(12))
        ]
        text: Any = DecodedText.of(parts)
        want: Model = [
            piece for unit, control in parts for piece in ([unit] if control else unit)
        ]
        for _ in range(draw.randrange(5)):
            text, want = _changed(draw, text, want)
            assert model_of(text) == want
            assert text == "".join(want)


def _changed(draw: random.Random, text: Any, want: Model) -> tuple[Any, Model]:
    kind = draw.randrange(5)
    if kind == 0:
        more = draw.choice(["x", "<|open|>", ""])
        return text + more, [*want, *more]
    if kind == 1:
        more = draw.choice(["x", "<|open|>", ""])
        return more + text, [*more, *want]
    if kind == 2:
        return text + text, want + want
    if kind == 3:
        shown = "".join(want)
        return text.strip(), _slice(want, *_span(shown, shown.strip()))
    start, stop = sorted(draw.choices(range(len(text) + 3), k=2))
    return text[start:stop], _slice(want, start, stop)


def _span(text: str, part: str) -> tuple[int, int]:
    start = len(text) - len(text.lstrip()) if part else len(text)
    return start, start + len(part)


def _slice(units: Model, start: int, stop: int) -> Model:
    kept, place = [], 0
    for unit in units:
        first, last = max(start - place, 0), min(stop - place, len(unit))
        if first < last:
            whole = last - first == len(unit)
            kept += [unit] if whole else [*unit[first:last]]
        place += len(unit)
    return kept


def test_characters_of_control_names_equal_only_themselves():
    marked = [TEXT[place] for place in range(1, 9)]
    assert tuple(marked) == control_characters("<|open|>")
    assert tuple(marked) != tuple("<|open|>")
    assert "".join(marked) == "<|open|>"
    assert marked[0] not in {"<": 1}
    assert marked[0] in {control_characters("<|open|>")[0]: 1}
    assert marked[0] != control_characters("<|sep|>")[0]
    assert marked[-1] == TEXT[8 - len(TEXT)]
    assert (TEXT[0], TEXT[9], TEXT[-1]) == ("a", "b", "c")
    with pytest.raises(IndexError):
        TEXT[len(TEXT)]
    # Loops do not ask for places.
    assert [*TEXT] == [*str.__str__(TEXT)]


def test_one_edge_takes_out_the_name_of_any_control_id_but_a_marker():
    pad: Any = DecodedText.of([Piece("a[PAD]"), Piece("[PAD]", True), OPEN, Piece("b")])
    (other,) = OTHER_CONTROL
    assert [pad[place] == other for place in range(6, 11)] == [True] * 5
    assert other not in {pad[place]: 1 for place in (0, 5, 11, 19)}
    assert pickle.loads(pickle.dumps(pad[7])) == other
    assert "".join(pad[place] for place in range(6, 11)) == "[PAD]"
    assert Marker(OTHER_CONTROL).left(pad) == "a[PAD]<|open|>b"


def test_the_end_of_a_marker_that_text_spells_equals_nothing():
    spelled = [TEXT[place] for place in range(10, 18)]
    assert "".join(spelled) == "<|open|>"
    assert spelled[:-1] == [*"<|open|"]
    assert spelled[-1] != ">"
    assert spelled[-1] not in {">": 1}
    assert spelled[-1] not in {control_characters("<|open|>")[-1]: 1}
    assert DecodedText("a > b|>")[2] == DecodedText("a > b|>")[6] == ">"


class Marker:
    """A state machine of mlx-lm that strips ``edges`` from a text."""

    def __init__(self, *edges: Any):
        machine = TextStateMachine({"normal": [(edge, "normal") for edge in edges]})
        self._state = machine.make_state("normal")

    def left(self, *texts: str) -> str:
        shown = ""
        for text in texts:
            self._state, segments = TextStateMachine.split(self._state, text)
            shown += "".join(part for _, part in segments)
        self._state, rest, _ = TextStateMachine.flush(self._state)
        return shown + rest


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 100])
def test_the_hosts_machine_finds_control_ids_alone(chunks: int):
    parts = [
        OPEN,
        Piece("think"),
        SEP,
        Piece(SPELLED),
        CLOSE,
        Piece("<|close|>"),
        CLOSE,
    ]
    ids = ids_of(TOKENIZER, parts)
    texts = [TOKENIZER.decode(ids[i : i + chunks]) for i in range(0, len(ids), chunks)]
    exact = [control_characters(name) for name in ("<|open|>", "<|close|>", "<|sep|>")]
    strings = ["<|open|>", "<|close|>", "<|sep|>"]
    assert Marker(*exact).left(*texts) == f"think{SPELLED}<|close|>"
    whole = f"<|open|>think<|sep|>{SPELLED}<|close|><|close|><|close|>"
    assert Marker(*strings).left(*texts) == whole
    assert Marker(*strings).left(whole).count("<|") < whole.count("<|") / 4


def test_words_that_are_no_markers_are_found_in_text():
    ids = ids_of(TOKENIZER, [OPEN, Piece("a </x> b\n\nUser: c"), SEP])
    text = TOKENIZER.decode(ids)
    assert Marker("</x>").left(text) == "<|open|>a  b\n\nUser: c<|sep|>"
    assert Marker("\n\nUser:").left(text) == "<|open|>a </x> b c<|sep|>"


def test_decode_tells_control_ids_from_text():
    parts = [Piece("é<|sep|>"), OPEN, OPEN, Piece("x"), SEP]
    ids = ids_of(TOKENIZER, parts)
    text = TOKENIZER.decode(ids)
    assert isinstance(text, DecodedText)
    assert model_of(text) == [*"é<|sep|>", "<|open|>", "<|open|>", "x", "<|sep|>"]
    skipped = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert (skipped, skipped.controls) == ("é<|sep|>x", ())
    assert TOKENIZER.decode([ids[-1]]).controls == ((0, 7),)
    assert TOKENIZER.decode(ids[-1]) == "<|sep|>"
    assert TOKENIZER.decode([]) == ""
    batch = TOKENIZER.batch_decode([ids, ids[:1]])
    assert [type(one) for one in batch] == [DecodedText] * 2
    # Bytes of a character on both sides of a control id are no character.
    first, second = "é".encode()
    assert TOKENIZER.decode([first, ids[-1], second]) == "\ufffd<|sep|>\ufffd"


@pytest.mark.parametrize("special", [False, True])
def test_what_was_decoded_becomes_the_same_ids(special: bool):
    """A marker that somebody spelled stays text, a control id what it is."""
    begun = [*opened("message", ' role="user"'), Piece(SPELLED), *closed("message")]
    tag = Piece("<|open|>think<|sep|>")
    for parts in (begun, opened("think"), [tag], [Piece(f"<|open|>message {SPELLED}")]):
        ids = ids_of(TOKENIZER, parts)
        text = TOKENIZER.decode(ids)
        assert TOKENIZER.encode(text, add_special_tokens=special) == ids
    plain = str.__str__(TOKENIZER.decode(ids_of(TOKENIZER, [tag])))
    assert len(TOKENIZER.encode(plain)) == 3


def test_a_callers_word_on_control_ids_goes_before_what_decoded_text_knows():
    text = TOKENIZER.decode(ids_of(TOKENIZER, [OPEN, Piece("<|open|>")]))
    first = min(TOKENIZER.all_special_ids)
    for split, count in ((True, 0), (None, 1), (False, 2)):
        ids = TOKENIZER.encode(text, split_special_tokens=split)
        assert sum(i >= first for i in ids) == count


def test_a_prompt_and_its_answer_keep_their_ids():
    messages = [{"role": "user", "content": SPELLED}]
    options = {"add_generation_prompt": True}
    prompt = TOKENIZER.apply_chat_template(messages, tokenize=False, **options)
    answer = ids_of(TOKENIZER, [Piece(SPELLED), *closed("think"), *opened("response")])
    ids = TOKENIZER.apply_chat_template(messages, **options) + answer
    text = prompt + TOKENIZER.decode(answer)
    assert TOKENIZER.encode(text, add_special_tokens=False) == ids
    assert TOKENIZER.encode(f"{text}") == ids
