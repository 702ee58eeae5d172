"""docs/serving.md: its recipes run as they stand, apart from the address and the build."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from openai import APIConnectionError, APIError, OpenAI
from serving import MODEL, ScriptedModel, Server, serve_build, serve_script

from kimi_k3 import load
from kimi_k3.nano import NANO_FOLDER

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "serving.md").read_text()
ADDRESS = "http://127.0.0.1:8080"
BIN = Path(sys.executable).parent

#: What the nano says to the page's question, and what it knows.
QUESTION, ANSWER = "Write a Python function that adds two numbers.", "return a + b"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def block(language: str, having: str) -> str:
    (found,) = [text for text in blocks(language) if having in text]
    return found


def words(having: str) -> list[str]:
    """The page's command with ``having`` in it, as a shell would pass it on."""
    text = block("sh", having).replace("$BUILD", str(NANO_FOLDER))
    return shlex.split(text.replace("\\\n", " "))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The page's server. A nano that samples may go on for long, so it is kept short."""
    command = words("--prompt-cache-bytes")
    for option, value in (("--temp", "0.0"), ("--max-tokens", "400")):
        command[command.index(option) + 1] = value
    for option in ("--model", "--port"):
        place = command.index(option)
        del command[place : place + 2]
    with serve_build(NANO_FOLDER, *command[1:]) as server:
        yield server


def test_curl(server: Server):
    command = words("curl -s http")
    options = dict(zip(command[3::2], command[4::2], strict=True))
    kind, value = options["-H"].split(": ")
    request = urllib.request.Request(
        command[2].replace(ADDRESS, server.url), options["-d"].encode(), {kind: value}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        message = json.load(reply)["choices"][0]["message"]
    assert ANSWER in message["content"]
    assert message["reasoning"]


def run_python(text: str, server: Server) -> dict[str, Any]:
    names: dict[str, Any] = {"BUILD": str(NANO_FOLDER)}
    exec(compile(text.replace(ADDRESS, server.url), "serving.md", "exec"), names)
    if isinstance(client := names.get("client"), OpenAI):
        client.close()
    return names


def test_client_that_streams(server: Server, capsys: pytest.CaptureFixture[str]):
    run_python(block("python", "stream=True"), server)
    assert ANSWER in capsys.readouterr().out


def test_client_with_tools(server: Server):
    messages = run_python(block("python", "for call in"), server)["messages"]
    assert [message["role"] for message in messages[:3]] == [
        *("user", "assistant", "tool")
    ]
    assert messages[1]["reasoning"]
    assert messages[2]["tool_call_id"] == messages[1]["tool_calls"][0]["id"]


def test_answers_in_python(server: Server, capsys: pytest.CaptureFixture[str]):
    text = block("python", "read_answer").replace("max_tokens=32768", "max_tokens=400")
    text = text.replace("make_sampler(1.0, 0.95)", "make_sampler(0.0)")
    answer = run_python(text, server)["answer"]
    assert ANSWER in answer.content
    assert answer.reasoning
    assert "<|" not in answer.content + answer.reasoning


def test_every_python_block_is_run():
    assert len(blocks("python")) == 3


def test_llm(server: Server, tmp_path: Path):
    settings = block("yaml", "model_id").replace(ADDRESS, server.url)
    (tmp_path / "extra-openai-models.yaml").write_text(settings)
    done = subprocess.run(
        [str(BIN / "llm"), *words("llm -m")[1:]],
        env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ANSWER in done.stdout, done.stderr
    assert "<|" not in done.stdout


def test_chat_in_a_terminal():
    command = words("mlx_lm.chat --model")
    command[command.index("--temp") + 1] = "0.0"
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        input=f"{QUESTION}\n{QUESTION}\nq\n",
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count(ANSWER) == 2, done.stderr


@pytest.mark.parametrize("language", ["json", "yaml"])
def test_settings_of_agents(language: str):
    read = json.loads if language == "json" else yaml.safe_load
    for text in blocks(language):
        found = json.dumps(read(text))
        assert f"{ADDRESS}/v1" in found
        assert MODEL in found


def test_options_of_the_server_exist():
    done = subprocess.run(
        [str(BIN / "mlx_lm.server"), "--help"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    start = PAGE.split("## Ask it")[0]
    named = set(re.findall(r"(--[a-z][a-z-]+)", start))
    assert named >= {"--temp", "--max-tokens", "--prompt-cache-bytes"}
    assert [option for option in named if option not in done.stdout] == []


def test_what_the_server_does_not_pass_on():
    """The page's table is true; when mlx-lm passes a field on, this says so."""
    _, tokenizer = load(NANO_FOLDER)
    model = ScriptedModel(tokenizer, [[]])
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    fields: dict[str, Any] = {
        "reasoning_effort": "low",
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
    }

    def prompt(client: OpenAI, text: str, **options: Any) -> str:
        model.prompts.clear()
        messages: Any = [{"role": "user", "content": text}]
        client.chat.completions.create(
            model=MODEL, messages=messages, tools=tools, **options
        )
        return "".join(map(tokenizer.decode, model.prompts))

    with serve_script(model, tokenizer) as server:
        client = server.client()
        plain = prompt(client, "A", **fields)
        told = prompt(client, "B", extra_body={"chat_template_kwargs": fields})
    for word in ("effort=low", "tool_choice=required", "response_format=json_object"):
        assert word not in plain
        assert word in told


def test_the_watch_starts_a_dead_server_again_and_ends_with_it():
    """The page's loop, with its times shortened."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    loop = block("sh", "while true").replace("$BUILD", str(NANO_FOLDER))
    loop = loop.replace("8080", port).replace("sleep 5", "sleep 0.1")
    server = Server(int(port))

    def wait_until(healthy: bool) -> None:
        deadline = time.monotonic() + 40
        while server.healthy() != healthy:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    watch = subprocess.Popen(
        ["bash", "-c", loop, "watch", "--max-tokens", "2"],
        env=os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_until(healthy=True)
        time.sleep(0.5)
        completions = server.client().completions
        with pytest.raises(APIError):
            completions.create(model=MODEL, prompt="")
        wait_until(healthy=False)
        wait_until(healthy=True)
        reply = completions.create(model=MODEL, prompt="a")
        assert reply.usage
        assert reply.usage.completion_tokens == 2
        watch.send_signal(signal.SIGTERM)
        watch.wait(timeout=10)
        with pytest.raises(APIConnectionError):
            completions.create(model=MODEL, prompt="a")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(watch.pid, signal.SIGKILL)
        watch.wait()
        for client in server.clients:
            client.close()
