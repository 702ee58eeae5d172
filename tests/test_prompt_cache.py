"""mlx-lm's server goes on from earlier prompts, and says what a cold run says.

A tiny random K3 serves through mlx-lm's own server. Whatever it had cached, each answer
is held against one pass of the model over prompt and answer that knows no cache at all.
"""

import random
import threading
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx_lm.models.cache as host
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.utils import load_tokenizer
from openai import APIConnectionError
from serving import MODEL, Server, serve_script
from tiny_k3 import t0_model, write_tk

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

#: Letters of one token each, which never merge: what an answer is made of comes back
#: as the same ids when it is sent again.
LETTERS = "QZXJVK"

#: Added to the logits of the ids that an answer may have.
BIAS = 50.0

#: Log-probabilities of float32 in chunks and steps, against one pass without a cache.
CLOSE = 2e-3

TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {}}}]


@pytest.fixture(scope="module")
def model() -> Any:
    return t0_model()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory, model: Any) -> Any:
    folder = write_tk(tmp_path_factory.mktemp("tk"))
    (folder / "config.json").write_text('{"model_type": "kimi_k3"}')
    return load_tokenizer(folder)


class Talk:
    """A conversation that changes at random; every answer is checked."""

    def __init__(self, server: Server, model: Any, tokenizer: Any, seed: int):
        self.random, self.client = random.Random(seed), server.client()
        self.model, self.tokenizer = model, tokenizer
        # A system message of few kinds, so that conversations share beginnings.
        system = {"role": "system", "content": "be brief" * self.random.randrange(2)}
        self.messages: list[Any] = [system]
        self.tools = self.random.choice([None, None, TOOLS])
        self.cached: list[int] = []
        self.answered: list[tuple[list[int], list[int], list[float], list[int]]] = []

    def step(self) -> None:
        """Change the conversation in one of the ways of agents, and ask."""
        changes = [self.question, self.question, self.result]
        if len(self.messages) > 2:
            changes += [self.again, self.again, self.edit, self.forget, self.shorten]
        self.random.choice(changes)()
        self.ask()

    def words(self) -> str:
        some = [*"abcdefgh", "<|end_of_msg|>", "<|open|>", "é", "\n"]
        return " ".join(self.random.choices(some, k=self.random.randrange(1, 12)))

    def question(self) -> None:
        self.messages.append({"role": "user", "content": self.words()})

    def result(self) -> None:
        """The last answer was a call; here is its result."""
        if self.messages[-1]["role"] != "assistant":
            return self.question()
        call_id = str(len(self.messages))
        function = {"name": "read", "arguments": '{"path": "a"}'}
        call = {"id": call_id, "type": "function", "function": function}
        self.messages[-1] = self.messages[-1] | {"tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call_id, "content": self.words()}
        self.messages.append(result)

    def again(self) -> None:
        if self.messages[-1]["role"] == "assistant":
            self.messages.pop()

    def edit(self) -> None:
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        self.messages[-1] = {"role": "user", "content": self.words()}

    def forget(self) -> None:
        """A client that does not send the reasoning back."""
        for message in self.messages:
            message.pop("reasoning", None)
        self.question()

    def shorten(self) -> None:
        del self.messages[self.random.randrange(2, len(self.messages)) :]
        self.question()

    def ask(self) -> None:
        # Mostly no word about the effort, which keeps the prompts of this test short.
        effort = self.random.choice([None] * 7 + ["low"])
        options: dict[str, Any] = {"thinking_effort": effort}
        ids = [self.tokenizer.encode(letter)[0] for letter in LETTERS]
        if self.random.random() < 0.3:
            ids += [self.tokenizer.convert_tokens_to_ids("<|end_of_msg|>")]
        seed = 1 if self.random.random() < 0.2 else None
        prompt = self.tokenizer.apply_chat_template(
            deepcopy(self.messages),
            tools=self.tools,
            add_generation_prompt=True,
            **options,
        )
        reply = self.client.chat.completions.create(
            model=MODEL,
            messages=deepcopy(self.messages),
            temperature=0,
            max_tokens=self.random.randrange(1, 9),
            logprobs=True,
            logit_bias={str(i): int(BIAS) for i in ids},
            seed=seed,
            extra_body={"tools": self.tools, "chat_template_kwargs": options},
        )
        choice = reply.choices[0]
        said = choice.model_dump()["logprobs"]["content"]
        answer, logprobs = [s["id"] for s in said], [s["logprob"] for s in said]
        usage: Any = reply.usage
        assert usage.prompt_tokens == len(prompt)
        self.cached.append(usage.prompt_tokens_details.cached_tokens)
        self.answered.append((prompt, answer, logprobs, ids))
        self.messages.append(choice.message.model_dump(exclude_none=True))


def check_all(talks: list[Talk]) -> None:
    for talk in talks:
        for prompt, answer, logprobs, ids in talk.answered:
            check_cold(talk.model, prompt, answer, logprobs, ids)


def check_cold(
    model: Any,
    prompt: list[int],
    answer: list[int],
    logprobs: list[float],
    ids: list[int],
) -> None:
    """``answer`` is greedy, and as likely as told, for a model without any cache."""
    logits = model(mx.array([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
    logits = logits.at[:, mx.array(ids)].add(BIAS)
    cold = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    chosen = mx.take_along_axis(cold, mx.array(answer)[:, None], axis=-1)[:, 0]
    assert float(mx.abs(chosen - mx.array(logprobs)).max()) < CLOSE
    assert float((cold.max(axis=-1) - chosen).max()) < CLOSE


def converse(server: Server, model: Any, tokenizer: Any, seed: int, steps: int) -> Any:
    """Three conversations; at each step one of them goes on, or two at once."""
    talks = [Talk(server, model, tokenizer, 10 * seed + i) for i in range(3)]
    order = random.Random(seed)
    for _ in range(steps):
        some = order.sample(talks, order.choice([1, 1, 2]))
        threads = [threading.Thread(target=talk.step) for talk in some]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(len(talk.answered) for talk in talks) >= steps
    return talks


@pytest.mark.parametrize(("seed", "size"), [(1, 10), (2, 4)])
def test_every_answer_is_that_of_a_cold_run(
    model: Any, tokenizer: Any, seed: int, size: int
):
    """Regenerated, edited, interleaved, evicted, batched or not: the state is right."""
    with serve_script(model, tokenizer, "--prompt-cache-size", str(size)) as server:
        talks = converse(server, model, tokenizer, seed, steps=16)
        held = server.generator.prompt_cache
        assert len(held) <= size
    cached = [count for talk in talks for count in talk.cached]
    assert sum(count > 0 for count in cached) > len(cached) // 3
    check_all(talks)


def test_a_state_that_is_a_little_wrong_is_noticed(model: Any, tokenizer: Any):
    """The twin: tokens are taken back in name only, as in B52."""
    pretend = {
        "can_trim_prompt_cache": lambda cache: True,
        "trim_prompt_cache": lambda cache, tokens: None,
    }
    with (
        mock.patch.multiple(host, **pretend),
        serve_script(model, tokenizer) as server,
    ):
        talks = converse(server, model, tokenizer, seed=1, steps=16)
    with pytest.raises(AssertionError):
        check_all(talks)


def read_by(model: Any, tokens: list[int]) -> list[Any]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    return cache


def test_what_is_fetched_is_a_copy(model: Any):
    held = LRUPromptCache()
    tokens = list(range(1, 30))
    held.insert_cache("k3", tokens, read_by(model, tokens))
    want = model(mx.array([[7]]), cache=read_by(model, tokens))
    for _ in range(2):
        fetched, rest = held.fetch_nearest_cache("k3", [*tokens, 7])
        assert rest == [7]
        got = model(mx.array([rest]), cache=fetched)
        assert mx.array_equal(got, want)
        # What follows must not reach the entry either.
        mx.eval(model(mx.array([[9, 9, 9]]), cache=fetched))


def test_a_longer_entry_never_serves_a_shorter_prompt(model: Any):
    held = LRUPromptCache()
    tokens = list(range(1, 30))
    held.insert_cache("k3", tokens, read_by(model, tokens))
    assert held.fetch_nearest_cache("k3", tokens[:20]) == (None, tokens[:20])
    held.insert_cache("k3", tokens[:12], read_by(model, tokens[:12]))
    fetched, rest = held.fetch_nearest_cache("k3", tokens[:20])
    assert fetched is not None
    assert rest == tokens[12:20]


@pytest.fixture
def inserted(model: Any, tokenizer: Any) -> Iterator[Any]:
    """A server and the (length, kind) of what it kept."""
    kept: list[tuple[int, str]] = []
    insert = LRUPromptCache.insert_cache

    def watched(self: Any, key: Any, tokens: Any, *rest: Any, **options: Any) -> None:
        kept.append((len(tokens), options.get("cache_type", "assistant")))
        insert(self, key, tokens, *rest, **options)

    with (
        mock.patch.object(LRUPromptCache, "insert_cache", watched),
        serve_script(model, tokenizer) as server,
    ):
        yield server, kept


class TestWhatIsKept:
    """What docs/prompt-cache.md says that the stock server keeps."""

    def ask(self, server: Server, *messages: Any, **options: Any) -> tuple[int, int]:
        reply = server.client().chat.completions.create(
            model=MODEL,
            messages=list(messages),
            temperature=0,
            max_tokens=3,
            extra_body=options,
        )
        usage: Any = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        return usage.prompt_tokens, usage.prompt_tokens - cached

    SYSTEM = {"role": "system", "content": "be brief"}
    USER = {"role": "user", "content": "a question"}
    CALL = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
    }
    RESULT = {"role": "tool", "tool_call_id": "1", "content": "a result"}

    def test_after_a_question(self, inserted: Any):
        server, kept = inserted
        length, read = self.ask(server, self.SYSTEM, self.USER)
        assert read == length
        (system, user, prompt, end) = kept
        assert [kind for _, kind in kept] == ["system", "user"] + 2 * ["assistant"]
        assert system[0] < user[0] == length - 3
        assert (prompt[0], end[0]) == (length - 1, length + 3)
        assert self.ask(server, self.SYSTEM, self.USER) == (length, 1)
        edited = {"role": "user", "content": "another one"}
        longer, read = self.ask(server, self.SYSTEM, edited)
        assert longer - read == system[0]

    def test_after_a_developer_message_nothing(self, inserted: Any):
        server, kept = inserted
        self.ask(server, self.SYSTEM | {"role": "developer"}, self.USER)
        assert [kind for _, kind in kept] == ["user"] + 2 * ["assistant"]

    def test_after_a_result(self, inserted: Any):
        server, kept = inserted
        messages = (self.SYSTEM, self.USER, self.CALL, self.RESULT)
        length, _ = self.ask(server, *messages)
        assert kept == [(length - 1, "assistant"), (length + 3, "assistant")]
        assert self.ask(server, *messages) == (length, 1)

    def test_with_a_seed_only_the_end(self, inserted: Any):
        server, kept = inserted
        for _ in range(2):
            length, read = self.ask(server, self.SYSTEM, self.USER, seed=1)
            assert read == length
            assert kept.pop() == (length + 3, "assistant")
            assert not kept


def test_a_prompt_that_ends_where_an_entry_ends_stops_the_server(
    model: Any, tokenizer: Any
):
    """mlx-lm's fault with any model: nothing is left to read, and it gives up."""
    with serve_script(model, tokenizer) as server:
        client = server.client()
        ids = {str(tokenizer.encode(letter)[0]): int(BIAS) for letter in LETTERS}
        options = {"model": MODEL, "temperature": 0, "logit_bias": ids}
        said = client.completions.create(prompt="Q", max_tokens=3, **options)
        text = "Q" + said.choices[0].text
        # The way out: one letter less.
        client.completions.create(prompt=text[:-1], max_tokens=1, **options)
        with pytest.raises(APIConnectionError):
            client.completions.create(prompt=text, max_tokens=1, **options)
        assert not server.healthy()
