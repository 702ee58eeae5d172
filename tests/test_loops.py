"""Loops are found where they are, and natural repetition is none."""

from dataclasses import replace
from functools import cache

import pytest
from scripted_answers import ROOT, ids_of, looping, sample_texts, tokens_of

from kimi_k3.answers import loops
from kimi_k3.answers.loops import (
    Enough,
    Kind,
    Loop,
    Token,
    compression_ratio,
    find_loop,
    repeated_share,
)

PERIODS = (1, 2, 3, 5, 8, 13, 21, 34, 55)


def enough(period: int) -> int:
    """Tokens from which a loop of words is one: 64 in 4 periods, or 96 in 3."""
    return min(max(64, 4 * period), max(96, 3 * period))


def found_in(ids: list[int], *, ended: bool = False) -> Loop | None:
    return find_loop(ids, tokens_of(ids), ended=ended)


@pytest.mark.parametrize("period", PERIODS)
def test_period_and_start_are_exact(period: int):
    for seed, start in enumerate((0, 1, 40, 200)):
        case = looping(seed, period, start, tokens=enough(period) + seed)
        loop = found_in(case.ids)
        assert loop is not None
        assert (loop.start, loop.period, loop.counts) == (start, period, False)
        assert loop.tokens == len(case.ids) - start


def test_known_share_is_found_exactly():
    answers = [looping(seed, PERIODS[seed % 9], 60, tokens=220) for seed in range(30)]
    prose = [ids_of(text)[:240] for text in list(sample_texts("english"))[:30]]
    found = [found_in(one.ids) for one in answers]
    assert sum(loop is None for loop in found) == 0
    assert sum(found_in(ids) is not None for ids in prose) == 0


@pytest.mark.parametrize("period", PERIODS)
def test_one_token_less_than_enough_is_no_loop(period: int):
    least = enough(period)
    assert found_in(looping(7, period, 30, least).ids) is not None
    assert found_in(looping(7, period, 30, least - 1).ids) is None


def test_what_goes_on_to_something_else_is_no_loop():
    case = looping(3, 5, 20, tokens=200)
    assert found_in(case.ids) is not None
    assert found_in([*case.ids, ids_of(".")[0]]) is None


def test_an_answer_that_ended_may_repeat_twice_as_much():
    case = looping(3, 4, 20, tokens=127)
    assert found_in(case.ids) is not None
    assert found_in(case.ids, ended=True) is None
    assert found_in(looping(3, 4, 20, tokens=128).ids, ended=True) is not None


COUNTING = "".join(f"Step {n}: check the next file again.\n" for n in range(3, 30))
STORY = "The kettle sang while she wrote a long letter home. "

NEAR_LOOPS = {
    "steps": COUNTING,
    "past a power of ten": "".join(
        f"I will now try attempt number {n} with care. " for n in range(985, 1020)
    ),
    "two numbers": "".join(
        f"After {n} tries the result was still {3 * n}. " for n in range(1, 30)
    ),
}

NATURAL = {
    "laughter": "She laughed: ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha ha",
    "counting": ", ".join(str(n) for n in range(1, 200)),
    "zeros": "double a[6][6] = {\n" + "  {0, 0, 0, 0, 0, 0},\n" * 6,
    "table": "| x | x squared |\n|---|---|\n"
    + "".join(f"| {n} | {n * n} |\n" for n in range(40)),
    "measurements": "".join(
        f"2024-01-{d:02}, {17 * d % 23}.{d % 10}, ok\n" for d in range(1, 31)
    ),
    "switch": "".join(f"    case {n}: return {n + 1};\n" for n in range(40)),
    "assertions": "".join(f"assert f({n}) == {n * n}\n" for n in range(40)),
    "list": "".join(
        f"- The {a} {b} stands by the door.\n"
        for a in ("red", "old", "wet", "new")
        for b in ("chair", "table", "lamp", "box", "clock")
    ),
    "refrain": (
        "Row, row, row your boat, gently down the stream.\n" * 2
        + "Merrily, merrily, life is but a dream.\n" * 2
    )
    * 2,
    "line": "Title\n" + "-" * 70 + "\n",
    "letters": "a" * 60,
}


@pytest.mark.parametrize("name", NEAR_LOOPS)
def test_loops_that_count_are_found(name: str):
    before = ids_of("In 1987, 1988, 1989, 1990 and 2024 it rained. " + STORY)
    loop = found_in(before + ids_of(NEAR_LOOPS[name].rstrip(" ")))
    assert loop is not None
    assert loop.counts
    assert abs(loop.start - len(before)) <= 3


@pytest.mark.parametrize("name", NATURAL)
def test_natural_repetition_is_no_loop(name: str):
    ids = ids_of(STORY + NATURAL[name])
    for stop in range(len(ids), len(ids) // 2, -7):
        assert found_in(ids[:stop]) is None


@cache
def natural_texts() -> list[list[int]]:
    """Prose, code, chats, tables and lists: 0.1 MB."""
    names = ("english", "chinese", "python", "c", "chat")
    texts = ["\n".join(sample_texts(name)) for name in names]
    files = (ROOT / "README.md", ROOT / "tests" / "README.md", ROOT / "pyproject.toml")
    texts += [file.read_text("utf-8") for file in files]
    return [ids_of(text[:20_000]) for text in texts]


def false_positives(window: int) -> tuple[int, int]:
    """Windows of natural text, cut anywhere, that are called loops; and all of them."""
    found = windows = 0
    for ids in natural_texts():
        tokens = tokens_of(ids)
        for stop in range(window, len(ids), 3 * window // 4):
            part = slice(stop - window, stop)
            windows += 1
            found += find_loop(ids[part], tokens[part], ended=False) is not None
    return found, windows


def test_no_false_positive_in_natural_text(monkeypatch: pytest.MonkeyPatch):
    assert false_positives(256) == (0, windows_of_natural_text())
    # The same count with a detector that asks for too little is not 0.
    little = {name: replace(e, tokens=2, periods=2) for name, e in loops.ENOUGH.items()}
    monkeypatch.setattr(loops, "ENOUGH", little)
    found, _ = false_positives(256)
    assert found > 0


def windows_of_natural_text() -> int:
    found = sum(len(range(256, len(ids), 192)) for ids in natural_texts())
    assert found > 250
    return found


def test_signs_need_more_than_words():
    dot = ids_of("*")[:1]
    assert found_in(ids_of(STORY) + dot * 127) is None
    assert found_in(ids_of(STORY) + dot * 128) is not None


def test_token_kinds():
    assert Token.of(b" 12").kind == Kind.DIGITS
    assert Token.of(b" Word").kind == Kind.LETTERS
    assert Token.of(b" Word").word == "word"
    assert Token.of("水".encode()[:2]).kind == Kind.LETTERS
    assert Token.of(b");\n").kind == Kind.SIGNS
    assert Enough(10, 3, 2).asks(2) == Enough(20, 6, 2)


def test_repeated_share():
    assert repeated_share([1, 2, 3, 4]) is None
    assert repeated_share(list(range(20))) == 0
    # 1234 2341 3412 4123 1234: one of five was there before.
    assert repeated_share([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(1 / 5)
    assert repeated_share([5] * 103) == 0.99


def test_compression_ratio():
    assert compression_ratio("short") is None
    prose = compression_ratio(STORY + " ".join(sample_texts("english"))[:2000])
    again = compression_ratio(STORY * 40)
    assert prose is not None
    assert again is not None
    assert 1.3 < prose < 3 < 20 < again
