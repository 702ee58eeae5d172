"""Each token's part of a conversation, against what was rendered."""

import re
from typing import Any

import numpy as np
import pytest
from conversations import INJECTION, WEATHER, assistant, call, system, tool, user
from tokenizer_folders import load_tk

from kimi_k3.evaluation.spans import SPANS, spans_of
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

#: Text and span, one after the other.
Parts = list[tuple[str, str]]

MESSAGE = "<|open|>message"
END = "<|close|>message<|sep|><|end_of_msg|>"


@pytest.fixture(scope="module")
def tk(tmp_path_factory: pytest.TempPathFactory) -> TikTokenTokenizer:
    return load_tk(tmp_path_factory.mktemp("tk"))


def ids_of(tk: Any, messages: list[Any], **options: Any) -> np.ndarray:
    options = {"thinking_effort": None, "add_generation_prompt": False} | options
    return np.array(tk.apply_chat_template(messages, tokenize=True, **options))


def merged(parts: Parts) -> Parts:
    """Neighbours of one span together, empty ones left out."""
    found: Parts = []
    for text, span in parts:
        if found and found[-1][1] == span:
            found[-1] = found[-1][0] + text, span
        elif text:
            found.append((text, span))
    return found


def parts_of(tk: Any, ids: np.ndarray, spans: np.ndarray) -> Parts:
    """What is in each span, of one row."""
    ends = np.flatnonzero(np.diff(spans)) + 1
    return [
        (tk.decode(part.tolist()), SPANS[kind[0]])
        for part, kind in zip(np.split(ids, ends), np.split(spans, ends), strict=True)
    ]


def check(tk: Any, ids: np.ndarray, want: Parts) -> np.ndarray:
    found = spans_of(ids[None], np.zeros((1, len(ids)), np.int32), tk)
    assert found.dtype == np.int8
    assert parts_of(tk, ids, found[0]) == merged(want)
    return found[0]


def controlled(tk: Any, text: str) -> np.ndarray:
    """Ids of ``text`` in which every marker is a control id."""
    ids: list[int] = []
    for piece in re.split(r"(<\|(?:open|close|sep|end_of_msg)\|>)", text):
        if re.fullmatch(r"<\|\w+\|>", piece):
            ids.append(tk.convert_tokens_to_ids(piece))
        else:
            ids += tk.encode(piece, add_special_tokens=False, split_special_tokens=True)
    return np.array(ids)


def section(name: str, text: str) -> str:
    return f"<|open|>{name}<|sep|>{text}<|close|>{name}<|sep|>"


def test_every_part(tk: TikTokenTokenizer):
    ids = ids_of(
        tk,
        [
            system("Be brief."),
            user("Weather in Rome?"),
            assistant(
                "I look.",
                reasoning_content="A tool.",
                tool_calls=[call("get_weather", {"city": "Rome", "days": 2}, "x")],
            ),
            tool("Sunny", tool_call_id="x"),
            assistant("It is sunny.", reasoning_content="Done."),
        ],
        tools=[WEATHER],
    )
    text = str(tk.decode(ids.tolist()))
    declared = text[text.index("# Tools") : text.index(END)]
    calls = text[text.index("<|open|>tools") : text.index("<|close|>tools")]
    check(
        tk,
        ids,
        [
            (f'{MESSAGE} role="system" type="tool-declare"<|sep|>', "markup"),
            (declared, "system"),
            (f'{END}{MESSAGE} role="system"<|sep|>', "markup"),
            ("Be brief.", "system"),
            (f'{END}{MESSAGE} role="user"<|sep|>', "markup"),
            ("Weather in Rome?", "user"),
            (f'{END}{MESSAGE} role="assistant"<|sep|>', "markup"),
            (section("think", "A tool."), "think"),
            (section("response", "I look."), "response"),
            (calls + "<|close|>tools<|sep|>", "tool call"),
            (
                f'{END}{MESSAGE} role="tool" tool="get_weather" index="1"<|sep|>',
                "markup",
            ),
            ("Sunny", "tool result"),
            (f'{END}{MESSAGE} role="assistant"<|sep|>', "markup"),
            (section("think", "Done."), "think"),
            (section("response", "It is sunny."), "response"),
            (END, "markup"),
        ],
    )
    assert '<|open|>argument key="city" type="string"<|sep|>Rome' in calls


def test_a_chat_without_thinking(tk: TikTokenTokenizer):
    ids = ids_of(tk, [user("Hi"), assistant("Hello")], thinking=False)
    check(
        tk,
        ids,
        [
            (f'{MESSAGE} role="user"<|sep|>', "markup"),
            ("Hi", "user"),
            (f'{END}{MESSAGE} role="assistant"<|sep|>', "markup"),
            (section("response", "Hello"), "response"),
            (END, "markup"),
        ],
    )


def test_text_that_spells_markers_is_text(tk: TikTokenTokenizer):
    """Broken twin: the same letters as control ids are another speaker."""
    ids = ids_of(tk, [user(INJECTION), assistant("No.")], thinking=False)
    spans = check(
        tk,
        ids,
        [
            (f'{MESSAGE} role="user"<|sep|>', "markup"),
            (INJECTION, "user"),
            (f'{END}{MESSAGE} role="assistant"<|sep|>', "markup"),
            (section("response", "No."), "response"),
            (END, "markup"),
        ],
    )
    obeyed = controlled(tk, str(tk.decode(ids.tolist())))
    assert len(obeyed) < len(ids)
    broken = spans_of(obeyed[None], np.zeros((1, len(obeyed)), np.int32), tk)[0]
    assert SPANS.index("system") in broken
    assert SPANS.index("system") not in spans


def test_text_is_text_to_its_end_id(tk: TikTokenTokenizer):
    ids = np.array([*tk.encode("int main", split_special_tokens=True), tk.eos_token_id])
    check(tk, ids, [("int main" + tk.eos_token, "text")])
    ended = np.array(
        [*tk.encode("int main"), tk.convert_tokens_to_ids("<|end_of_msg|>")]
    )
    check(tk, ended, [("int main<|end_of_msg|>", "text")])


OPENED = f'{MESSAGE} role="assistant"<|sep|>'

#: What no renderer writes, and models or cut windows do.
IRREGULAR: dict[str, Parts] = {
    "section-never-closed": [
        (OPENED, "markup"),
        ("<|open|>think<|sep|>a", "think"),
        ("<|open|>response<|sep|>b<|close|>response<|sep|>", "response"),
        ("c", "think"),
        (END + "d", "markup"),
    ],
    "message-never-closed": [
        (OPENED, "markup"),
        ("<|open|>response<|sep|>b", "response"),
        (f'{MESSAGE} role="user"<|sep|>', "markup"),
        ("c", "user"),
    ],
    "only-the-end": [
        (OPENED, "markup"),
        ("<|open|>response<|sep|>b", "response"),
        (f'<|end_of_msg|>{MESSAGE} role="user"<|sep|>', "markup"),
        ("c", "user"),
    ],
    "stray-closing-tag": [
        (f'{MESSAGE} role="user"<|sep|>', "markup"),
        ("a<|close|>think<|sep|>b", "user"),
        (END, "markup"),
    ],
    "nothing-open": [("a", "text"), ("<|close|>think<|sep|>b", "markup")],
    "no-message": [
        ("a", "text"),
        ("<|open|>think<|sep|>b<|close|>think<|sep|>", "think"),
        ("c<|open|>other<|sep|>d", "markup"),
    ],
    "message-closes-all": [
        (OPENED, "markup"),
        ("<|open|>think<|sep|>a", "think"),
        ("<|open|>tools<|sep|><|open|>call<|sep|>b", "tool call"),
        ("<|close|>message<|sep|>c", "markup"),
    ],
    "tag-in-a-tag": [
        (OPENED + "<|open|>resp", "markup"),
        ("<|open|>response<|sep|>b", "response"),
    ],
    "cut-in-a-tag": [
        (OPENED, "markup"),
        ("<|open|>think<|sep|>a", "think"),
        ("<|close|>thi", "markup"),
    ],
    "end-in-a-tag": [
        (OPENED + "<|open|>resp<|end_of_msg|>b", "markup"),
        ("<|open|>think<|sep|>c", "think"),
    ],
    "unknown-section": [
        (OPENED + "<|open|>plan<|sep|>a<|close|>plan<|sep|>", "markup"),
        ("<|open|>think<|sep|>b<|open|>plan<|sep|>c<|close|>plan<|sep|>d", "think"),
    ],
    "unknown-role": [(f'{MESSAGE} role="critic"<|sep|>a{END}', "markup")],
    "no-role": [(f"{MESSAGE}<|sep|>a{END}", "markup")],
    "role-in-a-name": [
        (f'{MESSAGE} role="user" name="a role=&quot;system&quot;"<|sep|>', "markup"),
        ("b", "user"),
    ],
    "empty-tag": [(OPENED + "<|open|><|sep|>a<|close|><|sep|>b", "markup")],
}


@pytest.mark.parametrize("name", IRREGULAR)
def test_irregular(name: str, tk: TikTokenTokenizer):
    want = IRREGULAR[name]
    text = "".join(part for part, _ in want)
    check(tk, controlled(tk, text), want)


def test_documents_go_on_over_rows_and_padding(tk: TikTokenTokenizer):
    """Tags split over rows; what begins beside a document does not change it."""
    ids = ids_of(
        tk,
        [user("one two"), assistant("three", reasoning_content="four")],
    )
    alone = spans_of(ids[None], np.zeros((1, len(ids)), np.int32), tk)[0]
    text = np.array(tk.encode(" and of", split_special_tokens=True))
    both = np.concatenate([ids, text, ids])
    owners = np.repeat([0, 1, 2], [len(ids), len(text), len(ids)])
    for length in (3, 4, 7, 16):
        missing = -len(both) % length
        tokens = np.pad(both, (0, missing)).reshape(-1, length)
        documents = np.pad(owners, (0, missing), constant_values=-1)
        found = spans_of(tokens, documents.reshape(-1, length), tk).reshape(-1)
        assert found[: len(ids)].tolist() == alone.tolist()
        assert found[len(ids) + len(text) :][: len(ids)].tolist() == alone.tolist()
        middle = found[len(ids) : len(ids) + len(text)]
        assert set(middle.tolist()) == {SPANS.index("text")}
        assert (found[len(both) :] == -1).all()
    # Broken twin: as one document, the text goes on with the conversation.
    joined = spans_of(both[None], np.zeros((1, len(both)), np.int32), tk)[0]
    assert SPANS.index("text") not in joined
