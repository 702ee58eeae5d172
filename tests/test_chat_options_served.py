"""Whatever a request has in chat_template_kwargs, mlx-lm's server outlives it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from conversations import user
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from serving import CHAT, ScriptedModel, Server, serve_script

from kimi_k3.nano import NANO_FOLDER

TOKENIZER: TokenizerWrapper = load_tokenizer(NANO_FOLDER)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = ScriptedModel(TOKENIZER, [TOKENIZER.encode("Yes.")])
    with serve_script(model, TOKENIZER) as server:
        yield server


def post(server: Server, options: Any) -> tuple[int, str]:
    """Status and body of a chat with ``options`` as its chat_template_kwargs."""
    body = {"messages": [user("a")], "chat_template_kwargs": options, "max_tokens": 2}
    return server.post(CHAT, body)


@pytest.mark.parametrize(
    "options",
    [
        {"return_tensors": "np"},
        {"return_tensors": "pt", "return_dict": True},
        {"truncation": True, "max_length": 0},
        {"max_length": 0},
        {"padding": "max_length", "max_length": 10**12},
        {"continue_final_message": "x"},
        {"thinking": "no"},
        {"tokenize": False},
        {"tools": 5},
        {"add_generation_prompt": False},
        {"conversation": []},
        {"self": 1},
        {"chat_template": "x"},
        {"documents": [1]},
        {"return_assistant_tokens_mask": True},
        [1],
        "no",
        5,
    ],
    ids=str,
)
def test_options_that_would_end_the_server_are_a_404(server, options):
    """The server hands them all to the tokenizer, and ends on what is no list of ids."""
    status, body = post(server, options)
    assert status == 404, body
    assert server.healthy()


@pytest.mark.parametrize(
    "options",
    [
        {"return_dict": True},
        {"padding": False, "truncation": False, "max_length": None},
        {"tokenizer_kwargs": 5, "sanitize_control_tokens": 5},
        {"split_special_tokens": False, "add_special_tokens": True},
        {"documents": [], "chat_template": None},
        {"thinking_effort": None, "response_schema": 5},
    ],
    ids=str,
)
def test_options_that_mean_nothing_to_a_server_change_nothing(server, options):
    plain = {"thinking_effort": options.get("thinking_effort", "max")}
    asked = [post(server, options), post(server, plain)]
    assert [status for status, _ in asked] == [200, 200]
    one, other = (json.loads(body)["usage"]["prompt_tokens"] for _, body in asked)
    assert one == other
    assert server.healthy()
