"""mlx-lm's own server, with a build in a process of its own or a scripted model in ours.

``serve_build`` runs the installed command ``mlx_lm.server``. ``serve_script`` runs the
same classes in this process, with a model that says what the test gave it.
"""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.server
from mlx_lm.models.cache import ArraysCache, LRUPromptCache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from openai import OpenAI

HOST = "127.0.0.1"

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

#: Name of the model that a server was started with.
MODEL = "default_model"

#: A tool that the nano knows how to call.
READ_FILE: Any = {
    "type": "function",
    "function": {
        "name": "read_file",
        "description": "Read a text file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}},
            "required": ["path"],
        },
    },
}

#: What a scripted model is loaded by.
SCRIPTED = "scripted"


@dataclass
class Server:
    """A running server; ``generator`` is there where it runs in this process."""

    port: int
    process: subprocess.Popen[bytes] | None = None
    generator: Any = None
    clients: list[OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def client(self, **options: Any) -> OpenAI:
        options = {"max_retries": 0, "timeout": 60} | options
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", **options)
        self.clients.append(client)
        return client

    def post(self, path: str, body: Any) -> tuple[int, str]:
        """Status and text of the reply to ``body``, sent as JSON unless it is bytes.

        OpenAI's client checks what it sends; this sends anything.
        """
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False


@contextlib.contextmanager
def serve_build(
    folder: Path,
    *options: str,
    command: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """The installed ``mlx_lm.server`` on ``folder``; ``command`` in its place.

    ``environment`` is added to that of this process.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    command = command or [str(Path(sys.executable).parent / "mlx_lm.server")]
    process = subprocess.Popen(
        [*command, "--model", str(folder), "--port", str(port), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(environment or {})},
    )
    server = Server(port, process)
    try:
        deadline = time.monotonic() + 60
        while not server.healthy():
            assert process.poll() is None, f"the server ended: {process.returncode}"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.1)
        yield server
    finally:
        _close(server)
        process.kill()
        process.wait()


@contextlib.contextmanager
def serve_script(
    model: nn.Module, tokenizer: TokenizerWrapper, *options: str
) -> Iterator[Server]:
    """mlx-lm's server classes in this process, on a scripted or any other model."""
    provider = _provider(options)

    def load(name: str, return_config: bool = False, **_: Any) -> tuple[Any, ...]:
        if name != SCRIPTED:
            raise FileNotFoundError(f"no model {name}")
        if isinstance(model, ScriptedModel):
            model.loads += 1
        config = {"model_type": "kimi_k3"}
        return (model, tokenizer, config) if return_config else (model, tokenizer)

    listening = threading.Event()
    started: list[ThreadingHTTPServer] = []

    class Listening(ThreadingHTTPServer):
        daemon_threads = True

        def server_activate(self) -> None:
            super().server_activate()
            started.append(self)
            listening.set()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Clients of these tests go away in mid-answer on purpose."""

    with mock.patch.object(mlx_lm.server, "load", load):
        cache = LRUPromptCache(provider.cli_args.prompt_cache_size)
        generator = mlx_lm.server.ResponseGenerator(provider, cache)
        thread = threading.Thread(
            target=_listen, args=(generator, Listening), daemon=True
        )
        thread.start()
        assert listening.wait(20)
        server = Server(started[0].server_port, generator=generator)
        try:
            yield server
        finally:
            _close(server)
            started[0].shutdown()
            started[0].server_close()
            thread.join(20)
            generator.stop_and_join()


def _listen(generator: Any, kind: type[ThreadingHTTPServer]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mlx-lm's, that it is not for production
        mlx_lm.server._run_http_server(HOST, 0, generator, server_class=kind)


def _provider(options: Sequence[str]) -> Any:
    """mlx-lm's ModelProvider as its command makes it from ``options``."""
    made: list[Any] = []
    argv = ["mlx_lm.server", "--model", SCRIPTED, *options]
    with (
        mock.patch.object(sys, "argv", argv),
        mock.patch.object(mlx_lm.server, "run", lambda host, port, it: made.append(it)),
    ):
        mlx_lm.server.main()
    return made[0]


def _close(server: Server) -> None:
    for client in server.clients:
        client.close()


class ScriptedModel(nn.Module):
    """Says ``answers[n]``, ids, to a prompt that ends on ``script n``, else the first.

    A row's cache holds which answer it is in and how far. After its last id an answer
    goes on with the end id. ``seconds`` is what a step takes, ``steps`` counts them,
    and ``loads`` how often a server has loaded the model.
    """

    def __init__(self, tokenizer: TokenizerWrapper, answers: Sequence[Sequence[int]]):
        super().__init__()
        self.tokenizer, self.answers = tokenizer, [list(answer) for answer in answers]
        self.seconds, self.steps, self.loads = 0.0, 0, 0
        self.layers: list[Any] = []
        self.prompts: list[list[int]] = []
        self._start = tokenizer.encode("<|open|>think<|sep|>", add_special_tokens=False)
        self._end = tokenizer.encode("<|close|>think<|sep|>")
        self._eos = tokenizer.convert_tokens_to_ids("<|end_of_msg|>")

    def make_cache(self) -> list[Any]:
        return [ArraysCache(size=1)]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        """(B, T) ids → (B, T, vocabulary) logits with one id far above the others."""
        time.sleep(self.seconds)
        self.steps += 1
        B, T = inputs.shape
        held = cache[0][0]
        rows: Any = [[0, 0] for _ in range(B)] if held is None else held.tolist()
        prompts: Any = inputs.tolist()
        logits = mx.zeros((B, T, len(self.tokenizer)))
        for row, ids in enumerate(prompts):
            script, place = rows[row]
            if T > 1:
                self.prompts.append(ids)
                found = re.findall(r"script (\d+)", self.tokenizer.decode(ids))
                rows[row] = [int(found[-1]) if found else script, 0]
            elif place or ids[-1] == self._start[-1]:
                answer = self.answers[script]
                said = answer[place] if place < len(answer) else self._eos
                logits[row, -1, said] = 100.0
                rows[row] = [script, place + 1]
        cache[0][0] = mx.array(rows)
        cache[0].advance(T)
        return logits
