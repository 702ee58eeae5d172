"""Ask mlx-lm's own server a thousand things and watch the memory of its process.

    python benchmarks/serving_soak.py --out benchmarks/results/serving_soak.json
    python benchmarks/serving_soak.py --requests 3000 --tokens 300 \\
        --out benchmarks/results/serving_soak_longer.json
    python benchmarks/serving_soak.py --short       # 40 requests, 60 tokens

The installed ``mlx_lm.server`` serves a float32 copy of the shipped nano, in a process of
its own and with its default settings. Short requests of several kinds (chats, streams,
tools, no thinking, completions) come from four clients at once; then one answer runs on
for thousands of tokens. Every answer must be the one that the same request got the first
time. Resident memory is read between the rounds. The first fifth of the requests fills
what the server keeps on purpose, ten prompts of its cache and MLX's spare buffers; after
it memory must stay flat, or the command fails. The process settles over some 800 requests,
the last MB of them slowly, which the longer run shows. Nothing is timed.
The last line of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from mlx_lm import convert
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from serving import MODEL, READ_FILE, serve_build

from kimi_k3.nano import NANO_FOLDER

CLIENTS = 4

#: Requests between two readings of memory.
ROUND = 20

#: Makes glibc give freed memory back at once, so that resident means in use.
GIVE_BACK = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}

#: Share of the requests that fills the server's caches.
WARM_UP = 0.2

#: Without the nano's control ids an answer is plain text that ends at ``max_tokens``.
NO_CONTROL_IDS: Any = {str(i): -1000.0 for i in range(768, 1024)}

QUESTIONS = (
    "Write a Python function that adds two numbers.",
    "What does notes.txt say?",
    "What is the capital of France?",
    "用一句话介绍北京。",
    "Count from one to five.",
)

#: Asks a question through a client, and gives all that was answered.
Kind = Callable[[OpenAI, str], str]


def chat(client: OpenAI, question: str, **options: Any) -> str:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=8,
        **options,
    )
    return reply.choices[0].message.model_dump_json(exclude_none=True)


def chat_with_tools(client: OpenAI, question: str) -> str:
    return chat(client, question, tools=[READ_FILE])


def chat_without_thinking(client: OpenAI, question: str) -> str:
    kwargs = {"chat_template_kwargs": {"thinking": False}}
    return chat(client, question, extra_body=kwargs)


def stream(client: OpenAI, question: str) -> str:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": question}],
        max_tokens=16,
        stream=True,
    )
    return "".join(getattr(c.choices[0].delta, "reasoning", None) or "" for c in chunks)


def completion(client: OpenAI, question: str) -> str:
    reply = client.completions.create(model=MODEL, prompt=question, max_tokens=12)
    return f"{reply.choices[0].text} ({reply.choices[0].finish_reason})"


KINDS: tuple[Kind, ...] = (
    *(chat, stream, chat_with_tools, chat_without_thinking, completion),
)


def resident_mb(process: int) -> float:
    """Resident memory of ``process`` in MB."""
    done = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(process)], capture_output=True, check=True
    )
    return round(int(done.stdout) / 1024, 1)


def ask(client: OpenAI, number: int) -> tuple[int, str]:
    """The answer to request ``number``, and which of the different requests it is."""
    which = number % (len(KINDS) * len(QUESTIONS))
    kind, question = which % len(KINDS), which // len(KINDS)
    return which, KINDS[kind](client, QUESTIONS[question])


def short_requests(
    client: OpenAI, process: int, requests: int
) -> Iterator[dict[str, float]]:
    """Readings of memory while ``requests`` are asked; raises if an answer changes."""
    answers: dict[int, str] = {}
    started = time.monotonic()
    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in range(0, requests, ROUND):
            numbers = range(done, min(done + ROUND, requests))
            for which, answer in pool.map(lambda n: ask(client, n), numbers):
                first = answers.setdefault(which, answer)
                if not answer or answer != first:
                    raise RuntimeError(f"{which}: {first!r} became {answer!r}")
            asked, left = numbers.stop, requests - numbers.stop
            seconds = (time.monotonic() - started) / asked * left
            reading = {"requests": asked, "resident_mb": resident_mb(process)}
            print(f"{reading}, about {seconds:.0f} s left", flush=True)
            yield reading


def long_request(
    client: OpenAI, process: int, tokens: int
) -> Iterator[dict[str, float]]:
    """Readings at every tenth of one answer of ``tokens`` tokens."""
    started = time.monotonic()
    chunks = client.completions.create(
        model=MODEL,
        prompt=QUESTIONS[0],
        max_tokens=tokens,
        stream=True,
        logit_bias=NO_CONTROL_IDS,
        stream_options={"include_usage": True},
    )
    every = tokens // 10
    for said, chunk in enumerate(chunks, 1):
        if chunk.usage is not None:
            if chunk.usage.completion_tokens != tokens:
                raise RuntimeError(f"the answer ended after {chunk.usage}")
            yield {"tokens": tokens, "resident_mb": resident_mb(process)}
            break
        if said % every == 0:
            left = (time.monotonic() - started) / said * (tokens - said)
            reading = {"pieces": said, "resident_mb": resident_mb(process)}
            print(f"{reading}, about {left:.0f} s left", flush=True)
            yield reading


def growth_mb(readings: list[dict[str, float]]) -> float:
    """How far the median of the last quarter after the warm-up is above the first's.

    What is held for a moment goes again; what is lost stays.
    """
    skipped = WARM_UP * readings[-1]["requests"]
    warm = [r["resident_mb"] for r in readings if r["requests"] > skipped]
    quarter = max(1, len(warm) // 4)
    return round(median(warm[-quarter:]) - median(warm[:quarter]), 1)


def soak(requests: int, tokens: int, *options: str) -> dict[str, Any]:
    """The readings of one server that answers ``requests`` and one of ``tokens``."""
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "nano"
        convert(str(NANO_FOLDER), str(build), dtype="float32")
        with serve_build(build, *options, environment=GIVE_BACK) as server:
            assert server.process is not None
            client, process = server.client(timeout=600), server.process.pid
            started = resident_mb(process)
            short = list(short_requests(client, process, requests))
            long = list(long_request(client, process, tokens))
    return {
        "resident_mb_at_start": started,
        "short": short,
        "growth_mb_after_warm_up": growth_mb(short),
        "long": long,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="short requests")
    parser.add_argument("--tokens", type=int, default=3000, help="of the long answer")
    parser.add_argument("--short", action="store_true", help="40 requests, 60 tokens")
    parser.add_argument(
        "--limit-mb", type=float, default=30, help="growth that is too much"
    )
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    requests, tokens = options.requests, options.tokens
    if options.short:
        requests, tokens = 40, 60
    result = {
        "benchmark": "serving_soak",
        "command": f"python benchmarks/serving_soak.py --requests {requests} "
        f"--tokens {tokens}",
        "machine": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "clients": CLIENTS,
        **soak(requests, tokens),
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    flat = result["growth_mb_after_warm_up"] <= options.limit_mb
    if not flat:
        print(f"Memory grew by {result['growth_mb_after_warm_up']} MB.")
    print(json.dumps(result))
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
