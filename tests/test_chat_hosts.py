"""Prompts as mlx-lm's own commands and server build them: a user cannot forge markers."""

import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx_lm.cache_prompt
import mlx_lm.server
import pytest
from conversations import INJECTION, WEATHER, assistant, call, system, tool, user
from mlx_lm.models.cache import load_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tuner.datasets import ChatDataset, TextDataset
from mlx_lm.utils import load_tokenizer
from tiny_k3 import write_t1

#: mlx-lm's package has a function of this name before the module.
GENERATE: Any = import_module("mlx_lm.generate")

FIRST_CONTROL = 320

Command = Callable[..., list[int]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_t1(tmp_path_factory.mktemp("t1") / "model", tokenizer=True)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TokenizerWrapper:
    return load_tokenizer(folder)


@pytest.fixture
def generate_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """``mlx_lm.generate`` on T1 up to generation; gives the prompt's ids."""

    def run(*arguments: str) -> list[int]:
        prompts: list[list[int]] = []
        monkeypatch.setattr(
            GENERATE,
            "generate",
            lambda model, tokenizer, prompt, **rest: prompts.append(prompt) or "",
        )
        monkeypatch.setattr(
            sys,
            "argv",
            ["generate", "--model", str(folder), "--verbose", "f", *arguments],
        )
        GENERATE.main()
        return prompts[0]

    return run


def controls(ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id >= FIRST_CONTROL]


def test_generate_command(generate_command, tokenizer):
    ids = generate_command("--prompt", INJECTION)
    messages = [user(INJECTION)]
    assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert controls(ids) == controls(generate_command("--prompt", "harmless"))
    assert INJECTION in tokenizer.decode(ids)


def test_generate_command_with_everything(generate_command, tokenizer):
    ids = generate_command(
        *("--prompt", INJECTION, "--system-prompt", INJECTION),
        *("--prefill-response", INJECTION),
        *("--chat-template-config", json.dumps({"thinking_effort": "low"})),
    )
    assert ids == tokenizer.apply_chat_template(
        [system(INJECTION), user(INJECTION), assistant(INJECTION)],
        continue_final_message=True,
        thinking_effort="low",
    )


def test_generate_command_with_a_hostile_config(generate_command, tokenizer):
    config = {
        "tools": [{"name": INJECTION, "parameters": {INJECTION: INJECTION}}],
        "tool_choice": {"type": "function", "function": {"name": INJECTION}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"schema": {INJECTION: INJECTION}},
        },
        "reasoning_effort": "low",
    }
    arguments = ("--prompt", INJECTION, "--chat-template-config")
    ids = generate_command(*arguments, json.dumps(config))
    harmless = json.dumps(config).replace(json.dumps(INJECTION), '"harmless"')
    assert controls(ids) == controls(generate_command(*arguments, harmless))
    assert ids == tokenizer.apply_chat_template(
        [user(INJECTION)], add_generation_prompt=True, **config
    )
    assert tokenizer.decode(ids).count(INJECTION) == 1
    assert tokenizer.decode(ids).count(json.dumps(INJECTION)) == 5


def test_generate_command_without_thinking(generate_command, tokenizer):
    ids = generate_command(
        "--prompt", "Q", "--chat-template-config", '{"enable_thinking": false}'
    )
    assert tokenizer.decode(ids).endswith('"assistant"<|sep|><|open|>response<|sep|>')


def test_generate_command_after_cached_prompt(
    folder, generate_command, tokenizer, tmp_path, monkeypatch
):
    """The cached start and the rest of the prompt make one conversation."""
    file = tmp_path / "prompt.safetensors"
    start = ["--model", str(folder), "--prompt", "Hello <|sep|>"]
    monkeypatch.setattr(
        sys, "argv", ["cache_prompt", *start, "--prompt-cache-file", str(file)]
    )
    mlx_lm.cache_prompt.main()
    cached = tokenizer.apply_chat_template(
        [user("Hello <|sep|>")], continue_final_message=True
    )
    loaded: Any = load_prompt_cache(str(file))
    assert loaded[3].offset == len(cached)
    rest = generate_command("--prompt", INJECTION, "--prompt-cache-file", str(file))
    text = tokenizer.decode([*cached, *rest])
    asked = [user("Hello <|sep|>" + INJECTION)]
    assert text == tokenizer.apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert controls(rest) == [324, 325, 322, 323, 325, 323, 325]


def test_raw_completion(generate_command, tokenizer):
    ids = generate_command("--ignore-chat-template", "--prompt", INJECTION)
    assert not controls(ids)
    written = '<|open|>message role="user"<|sep|>Q<|close|>message<|sep|><|end_of_msg|>'
    ids = generate_command("--ignore-chat-template", "--prompt", written)
    assert controls(ids) == [323, 325, 324, 325, 322]


def request(**parts: Any) -> mlx_lm.server.CompletionRequest:
    empty = {"prompt": "", "messages": [], "tools": None, "role_mapping": None}
    return mlx_lm.server.CompletionRequest(**{"request_type": "chat", **empty, **parts})


def as_served(
    tokenizer: TokenizerWrapper,
    asked: mlx_lm.server.CompletionRequest,
    **template_kwargs: Any,
) -> tuple[list[int], list[list[int]], str]:
    """Prompt, its segments and the initial state that the stock server comes to."""
    provider = SimpleNamespace(
        processor=None, cli_args=SimpleNamespace(chat_template_args={})
    )
    prompt, segments, _, state, _ = mlx_lm.server.ResponseGenerator._tokenize(
        SimpleNamespace(model_provider=provider),  # pyright: ignore[reportArgumentType]
        tokenizer,
        asked,
        SimpleNamespace(chat_template_kwargs=template_kwargs),
    )
    return prompt, segments, state


def test_server_chat(tokenizer):
    messages = [
        system(INJECTION),
        user(INJECTION),
        assistant(None, tool_calls=[call("f", json.dumps({"a": INJECTION}), "1")]),
        tool(INJECTION, tool_call_id="1"),
        user([{"type": "text", "text": INJECTION}]),
    ]
    want = tokenizer.apply_chat_template(
        messages, tools=[WEATHER], add_generation_prompt=True
    )
    asked = request(messages=messages, tools=[WEATHER])
    prompt, segments, state = as_served(tokenizer, asked)
    assert prompt == want == [token_id for segment in segments for token_id in segment]
    assert len(segments) == 3
    assert state == "reasoning"
    assert tokenizer.decode(segments[2]) == "<|open|>think<|sep|>"


def test_server_chat_options(tokenizer):
    asked = request(messages=[user("Q")])
    prompt, _, state = as_served(tokenizer, asked, enable_thinking=False)
    assert state == "normal"
    assert tokenizer.decode(prompt).endswith("<|open|>response<|sep|>")
    prompt, _, _ = as_served(tokenizer, asked, thinking_effort="low")
    assert "thinking_effort=low" in tokenizer.decode(prompt)


def test_server_text_that_comes_back_as_text(tokenizer):
    """The image path renders to text and encodes that again."""
    text = tokenizer.apply_chat_template([user(INJECTION)], tokenize=False)
    again = tokenizer.encode(text, add_special_tokens=False)
    assert again == tokenizer.apply_chat_template([user(INJECTION)])
    assert tokenizer.convert_tokens_to_ids("<|media_pad|>") not in again


def test_server_completion(tokenizer):
    asked = request(request_type="text", prompt=INJECTION)
    assert not controls(as_served(tokenizer, asked)[0])
    assert as_served(tokenizer, request(request_type="text", prompt=""))[0] == []


def test_training_data(tokenizer):
    """Trained on as prompts are rendered; plain text ends with the end id."""
    turns = [user(INJECTION), assistant("A")]
    ids, offset = ChatDataset([], tokenizer, mask_prompt=True).process(
        {"messages": turns}
    )
    assert ids == tokenizer.apply_chat_template(turns)
    assert ids[:offset] == tokenizer.apply_chat_template(
        turns[:1], add_generation_prompt=True
    )
    ids, _ = TextDataset([], tokenizer).process({"text": INJECTION})
    assert controls(ids) == [tokenizer.eos_token_id]
    assert ids[-1] == tokenizer.eos_token_id
