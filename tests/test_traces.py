"""The shipped conversations: whole, rendered, and their spans as a reader labels them."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_k3.build import mix_file
from kimi_k3.build.mix_file import find_mix
from kimi_k3.build.samples import load_tokenizer, make_samples, make_samples_and_report
from kimi_k3.errors import SamplesError
from kimi_k3.evaluation.scored import Scored
from kimi_k3.evaluation.spans import SPANS, spans_of
from kimi_k3.nano import NANO_FOLDER

FOLDER = mix_file.WITH_TEXTS
COUNTS = {"audit": 20, "everyday": 39}

#: Script of what is said in sessions that are not in Latin letters.
LANGUAGES = {"Han": 4, "Cyrillic": 2, "Arabic": 2, "Japanese": 2, "Hangul": 2}
LANGUAGES |= {"Devanagari": 2}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(NANO_FOLDER)


def sessions(name: str) -> list[dict[str, Any]]:
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


EVERY = [session for name in COUNTS for session in sessions(name)]


def rendered(tokenizer: Any, session: dict[str, Any]) -> Any:
    return tokenizer.apply_chat_template(
        session["messages"], tools=session.get("tools"), tokenize=False
    )


def test_they_are_as_many_and_as_large_as_told():
    assert {name: len(sessions(name)) for name in COUNTS} == COUNTS
    readme = (FOLDER / "README.md").read_text()
    assert readme.startswith(f"# Traces\n\n{len(EVERY)} conversations")
    for name, count in COUNTS.items():
        assert f"`{name}.jsonl`, {count}: " in readme
    assert len({session["title"] for session in EVERY}) == len(EVERY)
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 250_000


@pytest.mark.parametrize("session", EVERY, ids=lambda session: session["title"])
def test_calls_fit_the_declared_tools_and_results_the_calls(session: dict[str, Any]):
    tools = {tool["function"]["name"]: tool for tool in session.get("tools", [])}
    waiting: list[str] = []
    for message in session["messages"]:
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, "a call without a result"
        for call in message.get("tool_calls", []):
            waiting.append(call["id"])
            asked = call["function"]
            schema = tools[asked["name"]]["function"]["parameters"]
            assert set(schema["required"]) <= set(asked["arguments"])
            assert set(asked["arguments"]) <= set(schema["properties"])
    assert session["messages"][-1]["role"] == "assistant"
    assert session["messages"][-1]["content"]
    assert not waiting


def test_the_plain_mix_takes_every_session():
    samples, report = make_samples_and_report("traces", NANO_FOLDER, "held_out")
    assert samples.tokens.shape == (len(EVERY), 1025)
    assert len(samples.document_hashes) == len(EVERY)
    assert not any(corpus.left_out for corpus in report.corpora)
    first = samples.labels[:, 0]
    found = Counter(samples.corpora[number] for number in first.tolist())
    assert found == COUNTS
    everything = make_samples("traces", NANO_FOLDER, "all")
    np.testing.assert_array_equal(everything.tokens, samples.tokens)


def test_no_calibration_gets_any():
    with pytest.raises(SamplesError, match="corpus 'audit' has 0 of"):
        make_samples("traces", NANO_FOLDER, "calibration")


def test_each_span_and_language_is_there(tokenizer: Any):
    scored = Scored.of(make_samples("traces", NANO_FOLDER, "held_out"), tokenizer)
    found = Counter(SPANS[number] for number in scored.span.tolist())
    assert set(found) == set(SPANS) - {"text"}
    assert min(found.values()) > 2000
    of_document = dict(
        zip(scored.document.tolist(), scored.language.tolist(), strict=True)
    )
    languages = Counter(scored.languages[number] for number in of_document.values())
    assert languages == {**LANGUAGES, "Latin": len(EVERY) - sum(LANGUAGES.values())}


@pytest.mark.parametrize("session", EVERY, ids=lambda session: session["title"])
def test_only_the_template_writes_control_ids(tokenizer: Any, session: dict[str, Any]):
    prompt = rendered(tokenizer, session)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    placed = sum(piece.control for piece in prompt.pieces)
    assert np.isin(ids, tokenizer.all_special_ids).sum() == placed


def test_a_session_spells_markers(tokenizer: Any):
    """The case of the test above is there, and could fail."""
    (session,) = [s for s in EVERY if s["title"] == "Text that spells markers"]
    prompt = rendered(tokenizer, session)
    placed = sum(piece.control for piece in prompt.pieces)
    spelled = re.findall(r"<\|\w+\|>|\[EOS\]", str.__str__(prompt))
    assert len(spelled) > placed
    naive = tokenizer.encode(
        "".join(list(prompt)), add_special_tokens=False, split_special_tokens=False
    )
    assert np.isin(naive, tokenizer.all_special_ids).sum() != placed


#: Two sessions as they are rendered; each piece with the span that a reader gives it.
#: ``{ … }`` are control ids: open, close, sep, end of message.
OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_END_MESSAGE = (f"{CLOSE}message{SEP}{END}", "markup")
_ASSISTANT = (f'{OPEN}message role="assistant"{SEP}', "markup")
_USER = (f'{OPEN}message role="user"{SEP}', "markup")
_EFFORT = [
    (f'{OPEN}message role="system" type="thinking-effort"{SEP}', "markup"),
    (
        "`thinking_effort` guides on how much to think in your thinking channel (not "
        "including the response channel), supported values include `low`, `medium`, "
        "`high`, and `max`.\nNow the system is invoked with `thinking_effort=max`.",
        "system",
    ),
    _END_MESSAGE,
]


def think(text: str) -> tuple[str, str]:
    return f"{OPEN}think{SEP}{text}{CLOSE}think{SEP}", "think"


def response(text: str) -> tuple[str, str]:
    return f"{OPEN}response{SEP}{text}{CLOSE}response{SEP}", "response"


LABELLED = {
    "How far is that in the old units": [
        (f'{OPEN}message role="system" type="tool-declare"{SEP}', "markup"),
        (
            "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
            '[{"function":{"description":"Value of an arithmetic expression","name":'
            '"calculate","parameters":{"properties":{"expression":{"type":"string"}},'
            '"required":["expression"],"type":"object"}},"type":"function"}]\n```',
            "system",
        ),
        _END_MESSAGE,
        *_EFFORT,
        _USER,
        (
            "A Russian novel says a village is 40 versts away, and the hero walks it in "
            "two days. How many kilometres a day? Please compute it exactly.",
            "user",
        ),
        _END_MESSAGE,
        _ASSISTANT,
        think("A verst is 500 sazhen = 1.0668 km. 40 × 1.0668 / 2."),
        response(""),
        (
            f'{OPEN}tools{SEP}{OPEN}call tool="calculate" index="1"{SEP}'
            f'{OPEN}argument key="expression" type="string"{SEP}40 * 1.0668 / 2'
            f"{CLOSE}argument{SEP}{CLOSE}call{SEP}{CLOSE}tools{SEP}",
            "tool call",
        ),
        _END_MESSAGE,
        (f'{OPEN}message role="tool" tool="calculate" index="1"{SEP}', "markup"),
        ("21.336", "tool result"),
        _END_MESSAGE,
        _ASSISTANT,
        think("42.672 vs 42.195: 0.477 km longer. OK."),
        response(
            "A verst is 1.0668 km, so 40 versts are 42.672 km, and he walks **21.336 km "
            "a day**. A brisk but ordinary day's walk; oddly, the whole way is half a "
            "kilometre longer than a marathon."
        ),
        _END_MESSAGE,
    ],
    "Without thinking aloud": [
        *_EFFORT,
        *(_USER, ("Capital of Mongolia?", "user"), _END_MESSAGE),
        *(_ASSISTANT, think(""), response("Ulaanbaatar."), _END_MESSAGE),
        *(_USER, ("And roughly how many people live there?", "user"), _END_MESSAGE),
        *(_ASSISTANT, think("")),
        response("About 1.7 million, close to half of the country."),
        *(_END_MESSAGE, _USER, ("Thanks.", "user"), _END_MESSAGE),
        *(_ASSISTANT, think(""), response("You're welcome."), _END_MESSAGE),
    ],
}


def labelled_ids(tokenizer: Any, title: str) -> tuple[list[int], list[str]]:
    """Ids of the labelled pieces and the label of each."""
    ids: list[int] = []
    labels: list[str] = []
    for text, span in LABELLED[title]:
        for part in re.split(r"(<\|\w+\|>)", text):
            if part in (OPEN, CLOSE, SEP, END):
                new = [tokenizer.convert_tokens_to_ids(part)]
            else:
                new = tokenizer.encode(
                    part, add_special_tokens=False, split_special_tokens=True
                )
            ids += new
            labels += [span] * len(new)
    return ids, labels


@pytest.mark.parametrize("title", LABELLED)
def test_spans_are_those_that_a_reader_gives(tokenizer: Any, title: str):
    (session,) = [s for s in EVERY if s["title"] == title]
    ids = tokenizer.encode(rendered(tokenizer, session), add_special_tokens=False)
    want, labels = labelled_ids(tokenizer, title)
    assert ids == want
    tokens = np.array([ids], np.int32)
    spans = spans_of(tokens, np.zeros_like(tokens), tokenizer)[0]
    assert [SPANS[number] for number in spans.tolist()] == labels
    # Broken twin: the marker that opens the first thought is another id.
    tokens[0, labels.index("think")] = 0
    spans = spans_of(tokens, np.zeros_like(tokens), tokenizer)[0]
    assert [SPANS[number] for number in spans.tolist()] != labels


def test_a_session_over_two_rows_and_beside_others(tokenizer: Any):
    """Spans go on in the next row, and begin anew with a document."""
    ids, labels = labelled_ids(tokenizer, "Without thinking aloud")
    length = len(ids) - 40
    tokens = np.zeros((3, length), np.int32)
    documents = np.full((3, length), -1, np.int32)
    row = np.array(ids, np.int32)
    tokens[0], documents[0] = row[:length], 0
    tokens[1, :40], documents[1, :40] = row[length:], 0
    tokens[1, 40:50], documents[1, 40:50] = row[3:13], 1
    tokens[2, : length - 1], documents[2, : length - 1] = row[: length - 1], 2
    spans = spans_of(tokens, documents, tokenizer)
    names = [[SPANS[n] if n >= 0 else "" for n in part] for part in spans.tolist()]
    assert names[0] + names[1][:40] == labels
    assert set(names[1][50:]) == {""}
    assert names[2] == [*labels[: length - 1], ""]


def test_a_mix_elsewhere_still_starts_from_here(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_mix("audit").base == tmp_path
    assert find_mix("traces").base == FOLDER
