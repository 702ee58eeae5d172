"""What mlx-lm's server reads again in a conversation of ten turns with tools.

    python benchmarks/prompt_cache.py --out benchmarks/results/prompt_cache.json

The installed ``mlx_lm.server`` serves the nano to OpenAI's client, with a fresh server
for every case. A turn is a user's question, the model's call of a tool, its result and
the answer, or the answer at once where the nano calls no tool. What was read is the
server's own count: ``usage.prompt_tokens`` less ``prompt_tokens_details.cached_tokens``.
Answers are greedy, so that the conversation is the same in every case; only counts are
taken, no times.
The last line of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from serving import READ_FILE, serve_build

from kimi_k3.nano import NANO_FOLDER

TURNS = 10
FILES = ("readme.md", "notes.txt", "config.json", "test.log", "setup.py")


@contextlib.contextmanager
def serve(*options: str) -> Iterator[OpenAI]:
    """A client of an ``mlx_lm.server`` that was just started on the nano."""
    with serve_build(NANO_FOLDER, *options) as server:
        yield server.client(timeout=600)


class Agent:
    """One conversation, and what the server read for each of its requests."""

    def __init__(
        self,
        client: OpenAI,
        *,
        instruction: str = "You read files for the user.",
        keeps_reasoning: bool = True,
        stream: bool = False,
        **options: Any,
    ):
        self.client, self.keeps_reasoning, self.stream = client, keeps_reasoning, stream
        self.options = options
        self.messages: list[Any] = [{"role": "system", "content": instruction}]
        self.requests: list[dict[str, int]] = []

    def turn(self, number: int, **options: Any) -> Iterator[None]:
        """A question and what follows from it; hands back after each request."""
        name = FILES[number % len(FILES)]
        self.messages.append({"role": "user", "content": f"What does {name} say?"})
        for _ in range(2):
            message = self.ask(**options)
            self.messages.append(message)
            yield
            for call in message.get("tool_calls", ()):
                result = f"{name} holds line {number} of the text."
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )
            if self.messages[-1]["role"] != "tool":
                return

    def turns(self, numbers: range) -> None:
        for number in numbers:
            for _ in self.turn(number):
                pass

    def ask(self, **options: Any) -> dict[str, Any]:
        """The answer to the conversation as it stands, as it goes into the next."""
        request = {"tools": [READ_FILE], "temperature": 0, "max_tokens": 200}
        request |= {"model": "default_model", "messages": deepcopy(self.messages)}
        request |= self.options | options
        if self.stream:
            message, usage = self._streamed(request)
        else:
            reply = self.client.chat.completions.create(**request)
            message, usage = reply.choices[0].message, reply.usage
            message = message.model_dump(exclude_none=True)
        cached = usage.prompt_tokens_details.cached_tokens
        self.requests.append(
            {
                "prompt": usage.prompt_tokens,
                "read": usage.prompt_tokens - cached,
                "answer": usage.completion_tokens,
            }
        )
        if not self.keeps_reasoning:
            message.pop("reasoning", None)
        return message

    def _streamed(self, request: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        message: dict[str, Any] = {"role": "assistant"}
        usage = None
        asked = self.client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
        for chunk in asked:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                delta = choice.delta.model_dump(exclude_none=True)
                for key in ("reasoning", "content"):
                    if delta.get(key):
                        message[key] = message.get(key, "") + delta[key]
                for call in delta.get("tool_calls", ()):
                    call.pop("index", None)
                    message.setdefault("tool_calls", []).append(call)
        return message, usage


def summary(agents: list[Agent]) -> dict[str, Any]:
    """Totals of all requests, and each of them."""
    requests = [request for agent in agents for request in agent.requests]
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request["prompt"] for request in requests),
        "read": sum(request["read"] for request in requests),
        "each": [agent.requests for agent in agents],
    }


def conversation(*server: str, **options: Any) -> dict[str, Any]:
    with serve(*server) as client:
        agent = Agent(client, **options)
        agent.turns(range(TURNS))
        return summary([agent])


def interleaved(agents: int, turns: int, *server: str) -> dict[str, Any]:
    """Agents with instructions of their own take turns, request by request."""
    with serve(*server) as client:
        some = [
            Agent(client, instruction=f"You are agent {number} and read files.")
            for number in range(agents)
        ]
        for number in range(turns):
            for _ in zip_longest(*(agent.turn(number) for agent in some)):
                pass
        return summary(some)


def once(**changed: Any) -> dict[str, Any]:
    """One turn of ten is asked with ``changed``, the next as before."""
    with serve() as client:
        agent = Agent(client)
        agent.turns(range(TURNS // 2))
        before = len(agent.requests)
        for _ in agent.turn(TURNS // 2, extra_body=changed):
            pass
        after = len(agent.requests)
        agent.turns(range(TURNS // 2 + 1, TURNS))
        return summary([agent]) | {
            "changed": agent.requests[before:after],
            "next": agent.requests[after],
        }


def last(
    change: Callable[[list[Any]], None],
    *server: str,
    back: Callable[[list[Any]], int],
    **options: Any,
) -> dict[str, Any]:
    """Ten turns; then the conversation is cut at ``back``, changed and asked again."""
    with serve(*server) as client:
        agent = Agent(client, **options)
        agent.turns(range(TURNS))
        del agent.messages[back(agent.messages) :]
        change(agent.messages)
        agent.requests.clear()
        agent.ask()
        return agent.requests[0]


def leave(messages: list[Any]) -> None:
    """Regenerate: the same conversation again."""


def edit(messages: list[Any]) -> None:
    messages[-1]["content"] = "What does main.c say?"


def answer(messages: list[Any]) -> int:
    """Where the last answer stands, which follows a result."""
    return len(messages) - 1


def after_question(turn: int) -> Callable[[list[Any]], int]:
    """Where what follows on the question of ``turn`` (from 0; negative: from the end)."""

    def place(messages: list[Any]) -> int:
        asked = [i for i, one in enumerate(messages) if one["role"] == "user"]
        return asked[turn] + 1

    return place


CACHE_SIZE = "--prompt-cache-size"
LARGE = (CACHE_SIZE, "100")

CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "reasoning sent back": lambda: conversation(),
    "reasoning sent back, streamed": lambda: conversation(stream=True),
    "reasoning dropped": lambda: conversation(keeps_reasoning=False),
    "with a seed": lambda: conversation(seed=1),
    "with a seed, reasoning dropped": lambda: conversation(
        seed=1, keeps_reasoning=False
    ),
    "two agents interleaved": lambda: interleaved(2, TURNS),
    "eight agents": lambda: interleaved(8, 3),
    "eight agents, 32 entries": lambda: interleaved(8, 3, CACHE_SIZE, "32"),
    "eight agents, 64 entries": lambda: interleaved(8, 3, CACHE_SIZE, "64"),
    "eight agents, 100 entries": lambda: interleaved(8, 3, *LARGE),
    "effort changed for one turn": lambda: once(
        chat_template_kwargs={"thinking_effort": "low"}
    ),
    "tool_choice in one turn": lambda: once(
        chat_template_kwargs={"tool_choice": "required"}
    ),
}

AFTERWARDS: dict[str, Callable[[], dict[str, Any]]] = {
    "last answer again": lambda: last(leave, back=answer),
    "last question again": lambda: last(leave, back=after_question(-1)),
    "last question edited": lambda: last(edit, back=after_question(-1)),
    "last question edited, 100 entries": lambda: last(
        edit, *LARGE, back=after_question(-1)
    ),
    "fifth question edited": lambda: last(edit, back=after_question(4)),
    "fifth question edited, 100 entries": lambda: last(
        edit, *LARGE, back=after_question(4)
    ),
    "first question edited": lambda: last(edit, back=after_question(0)),
    "last answer again, with a seed": lambda: last(leave, back=answer, seed=1),
    "last question edited, with a seed": lambda: last(
        edit, back=after_question(-1), seed=1
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="cases with this in their name")
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "prompt_cache",
        "command": "python benchmarks/prompt_cache.py",
        "machine": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "turns": TURNS,
    }
    for part, cases in (("conversations", CASES), ("afterwards", AFTERWARDS)):
        result[part] = {}
        for name, case in cases.items():
            if options.only is None or options.only in name:
                result[part][name] = measured = case()
                shown = {key: measured[key] for key in measured if key != "each"}
                print(f"{name}: {shown}", flush=True)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
