"""What a build is asked: up to the last question, with tools, each once."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_answers import TOKENIZER, conversation, ids_of, write_chats
from small_mix import SMALL, mix_of

from kimi_k3.answers.generation_prompts import Prompts, read_prompts
from kimi_k3.errors import EvaluationError, MixError, SamplesError

TOOL = {"name": "price", "parameters": {"type": "object"}}
CALL = {"id": "1", "function": {"name": "price", "arguments": "{}"}}
SESSION = {
    "tools": [TOOL],
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": [{"type": "text", "text": "How much?"}]},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "32 coins"},
        {"role": "assistant", "content": "They cost 32 coins."},
    ],
}


def read(folder: Path, *lines: dict[str, Any], **options: Any) -> Prompts:
    return read_prompts(write_chats(folder / "c.jsonl", lines), TOKENIZER, **options)


def rendered(messages: list[Any], tools: Any = None) -> tuple[int, ...]:
    return tuple(
        TOKENIZER.apply_chat_template(messages, tools, add_generation_prompt=True)
    )


def test_up_to_the_last_question_and_result(tmp_path: Path):
    found = read(tmp_path, SESSION).prompts
    messages = SESSION["messages"]
    assert [p.ids for p in found] == [
        rendered(messages[:4], [TOOL]),
        rendered(messages[:6], [TOOL]),
    ]
    assert [p.number for p in found] == [0, 1]
    for prompt in found:
        assert prompt.question == "How much?"
        assert prompt.tools == (TOOL,)
        assert prompt.begins_in == "think"
        assert prompt.corpus == "c"
        text = TOKENIZER.decode(list(prompt.ids))
        assert text.endswith(' role="assistant"<|sep|><|open|>think<|sep|>')


def test_tools_that_are_declared_later_are_offered(tmp_path: Path):
    later = {"role": "system", "tools": [TOOL]}
    asked = [{"role": "user", "content": "Hi."}, later]
    line = {"messages": [*asked, {"role": "user", "content": "How much?"}]}
    assert read(tmp_path, line).prompts[0].tools == (TOOL,)
    line = {"messages": [*asked, {"role": "assistant", "content": "Hello."}]}
    assert read(tmp_path, line).prompts[0].tools == ()


def test_a_prompt_is_asked_once(tmp_path: Path):
    once, twice = conversation("Hi."), conversation("Hi.")
    twice["messages"].append({"role": "assistant", "content": "Hello."})
    found = read(tmp_path, once, twice, conversation("Ho."))
    assert [p.number for p in found.prompts] == [0, 1]
    assert sorted(p.question for p in found.prompts) == ["Hi.", "Ho."]


def test_limit_is_told(tmp_path: Path):
    lines = [conversation(f"Question {n}?") for n in range(5)]
    assert read(tmp_path, *lines, limit=5).notes == ()
    found = read(tmp_path, *lines, limit=3)
    assert len(found.prompts) == 3
    assert found.notes == ("c: 3 prompts of more that there are (--limit).",)
    # The first of more are the same.
    assert read(tmp_path, *lines).prompts[:3] == found.prompts


def test_what_cannot_be_asked_is_left_out_and_told(tmp_path: Path):
    odd = {"messages": [{"role": "assistant", "content": "Hello."}]}
    found = read(tmp_path, odd, conversation("Hi."))
    assert len(found.prompts) == 1
    assert "1 left out, the first" in found.notes[0]
    assert "nothing to answer" in found.notes[0]
    with pytest.raises(EvaluationError, match=r"holds no prompt.*nothing to answer"):
        read(tmp_path, odd)


def test_texts_are_begun(tmp_path: Path):
    texts = ["The first text goes on for a while, as texts do.", "Short one"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "t.jsonl").write_text(lines)
    mix = mix_of(tmp_path, '[[corpus]]\nname = "t"\nshare = 1\njsonl = "t.jsonl"')
    found = read_prompts(mix, TOKENIZER, part="all", prompt_tokens=8).prompts
    by_length = sorted(found, key=lambda p: -len(p.ids))
    for prompt, text in zip(by_length, texts, strict=True):
        ids = ids_of(text)
        assert list(prompt.ids) == ids[: min(8, len(ids) // 2)]
        assert prompt.begins_in == "text"
        assert text.startswith(prompt.question)
        assert not prompt.is_conversation


def test_parts_of_a_mix_share_no_document():
    held_out = read_prompts(SMALL, TOKENIZER, limit=1000)
    others = read_prompts(SMALL, TOKENIZER, part="calibration", limit=1000)
    everything = read_prompts(SMALL, TOKENIZER, part="all", limit=1000)
    digests = [{p.digest for p in found.prompts} for found in (held_out, others)]
    assert digests[0]
    assert not digests[0] & digests[1]
    assert digests[0] | digests[1] == {p.digest for p in everything.prompts}
    assert held_out.fingerprint != everything.fingerprint


def test_what_is_refused(tmp_path: Path):
    with pytest.raises(EvaluationError, match="limit is 0"):
        read(tmp_path, conversation("Hi."), limit=0)
    with pytest.raises(EvaluationError, match="part is 'some'"):
        read(tmp_path, conversation("Hi."), part="some")
    with pytest.raises(EvaluationError, match=r"rows of tokens.*Name the mix"):
        read_prompts(tmp_path / "samples.npz", TOKENIZER)
    with pytest.raises(MixError, match="no file here and no shipped mix"):
        read_prompts("tracess", TOKENIZER)
    with pytest.raises(SamplesError, match="matches no file"):
        read_prompts(tmp_path / "none.jsonl", TOKENIZER)
    mix = mix_of(
        tmp_path,
        '[[corpus]]\nname = "c"\nshare = 1\nchats = "c.jsonl"',
        more="held_out = 0",
    )
    with pytest.raises(EvaluationError, match=r"holds nothing out.*--part all"):
        read_prompts(mix, TOKENIZER)


def test_tools_without_a_schema_are_refused_before_anything_is_asked(tmp_path: Path):
    bad = {"name": "price", "parameters": {"type": "objekt"}}
    with pytest.raises(EvaluationError, match=r"c, prompt 0, tool 'price'"):
        read(tmp_path, conversation("How much?", [bad]))
