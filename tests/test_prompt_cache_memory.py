"""What mlx-lm's prompt cache holds of a K3: counted right, bounded, and where not."""

import gc
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.utils import load_tokenizer
from serving import MODEL, serve_script
from tiny_k3 import t0_model, write_tk

from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.config import ModelArgs

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def model() -> Any:
    return t0_model()


@pytest.fixture
def snapshot_bytes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What docs/prompt-cache.md counts with."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    return import_module("prompt_cache_page").snapshot_bytes


def read_by(model: Any, tokens: list[int]) -> list[Any]:
    """A cache that has seen ``tokens``."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=cache))
    return cache


def arrays_of(cache: list[Any]) -> list[mx.array]:
    """Every array of the states, whole buffers where some of one is spare."""
    found = []
    for layer in cache:
        held = layer.cache if hasattr(layer, "cache") else [layer.keys, layer.values]
        found += [array for array in held if array is not None]
    return found


def test_bytes_are_those_of_the_arrays(model: Any):
    for length in (1, 30, 300):
        cache = read_by(model, [1 + i % 90 for i in range(length)])
        counted = sum(layer.nbytes for layer in cache)
        assert counted == sum(array.nbytes for array in arrays_of(cache)) > 0


def test_the_page_counts_as_the_caches_do(model: Any, snapshot_bytes: Any):
    """What a batch gives back has no room for more tokens, so the count is exact."""
    args = model.language_model.args
    for length in (1, 30, 300):
        one = read_by(model, [1 + i % 90 for i in range(length)])
        rows = [layer.merge([layer]).extract(0) for layer in one]
        counted = sum(layer.nbytes for layer in rows)
        assert counted == snapshot_bytes(args, length, item=4)


def test_an_entry_of_k3(snapshot_bytes: Any):
    """449 MB and 27.6 kB a token, as docs/making-a-build.md has it."""
    args = ModelArgs.from_dict(full_size_config()).text_config
    states = 69 * 96 * 128 * 128 * 4
    assert 0.434e9 < states < 0.435e9
    assert round(snapshot_bytes(args, 0) / 1e6) == 449
    assert snapshot_bytes(args, 1) - snapshot_bytes(args, 0) == 24 * (512 + 64) * 2


def test_eviction_keeps_within_bytes(model: Any):
    one = sum(layer.nbytes for layer in read_by(model, [1, 2]))
    held = LRUPromptCache(100, max_bytes=3 * one)
    for start in range(1, 9):
        tokens = [start, start + 1]
        held.insert_cache("k3", tokens, read_by(model, tokens))
        assert held.nbytes == min(start, 3) * one
    assert held.fetch_nearest_cache("k3", [1, 2])[0] is None
    assert held.fetch_nearest_cache("k3", [8, 9, 3])[0] is not None


def test_the_server_counts_bytes_when_a_request_comes(model: Any, tmp_path: Path):
    """Between two requests it may hold what the last one left beyond the bound."""
    (write_tk(tmp_path) / "config.json").write_text('{"model_type": "kimi_k3"}')
    tokenizer = load_tokenizer(tmp_path)
    room, after, before = 400_000, [], []
    options = ("--prompt-cache-bytes", str(room))
    with serve_script(model, tokenizer, *options) as server:
        held = server.generator.prompt_cache
        trim_to = held.trim_to

        def trimmed(*, n_bytes: int) -> None:
            before.append(held.nbytes)
            trim_to(n_bytes=n_bytes)
            after.append((held.nbytes, n_bytes))

        def ask(**options: Any) -> None:
            server.client().chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": f"{len(after)} {options}"}],
                max_tokens=2,
                **options,
            )

        with mock.patch.object(held, "trim_to", trimmed):
            for _ in range(5):
                ask()
            assert len(after) == 5
            # Requests that are not batched are added without any count.
            for seed in range(3):
                ask(seed=seed)
            assert len(after) == 5
    assert max(before) > room
    assert all(kept <= bound <= room for kept, bound in after)


class Sized:
    """Stands in for the states of one entry: nothing but their bytes."""

    def __init__(self, nbytes: int):
        self.nbytes = nbytes

    def is_trimmable(self) -> bool:
        return False


class Turns:
    """What a conversation of the released model has read, with a bound in bytes.

    Fetches, trims and inserts in the order of mlx-lm's server, into its own cache. The
    beginning is ``tokens`` long for the bytes, and a few for the cache, which is slow.
    """

    LEADING, BEGINNING, QUESTION, RESULT, ANSWER, TAIL = 10, 90, 10, 200, 20, 3

    def __init__(self, held: LRUPromptCache, tokens: int, size: Any, bound: float):
        self.held, self.length, self.size, self.bound = held, tokens, size, bound
        self.system = self.new(self.LEADING)
        self.tokens = self.system + self.new(self.BEGINNING)

    def new(self, count: int) -> list[Any]:
        return [object() for _ in range(count)]

    def bytes_of(self, count: int) -> int:
        return self.size(10_000 if count <= self.LEADING else self.length + count)

    def insert(self, tokens: list[Any], kind: str) -> None:
        states: Any = [Sized(self.bytes_of(len(tokens)))]
        self.held.insert_cache("k3", tokens[:], states, cache_type=kind)

    def request(self, added: int, *, question: bool = False) -> int:
        """Tokens read for a prompt with ``added`` tokens more."""
        self.tokens = self.tokens + self.new(added)
        prompt = self.tokens + self.new(self.TAIL)
        _, rest = self.held.fetch_nearest_cache("k3", prompt)
        known = len(prompt) - len(rest)
        running = self.bytes_of(known) if known else 0
        self.held.trim_to(n_bytes=int(self.bound - running))
        if question and known < len(self.system):
            self.insert(self.system, "system")
        if question and known < len(self.tokens):
            self.insert(self.tokens, "user")
        self.insert(prompt[:-1], "assistant")
        self.tokens = prompt + self.new(self.ANSWER)
        self.insert(self.tokens, "assistant")
        return len(rest)

    def turn(self) -> tuple[int, int]:
        return self.request(self.QUESTION, question=True), self.request(self.RESULT)


ADDED = (Turns.QUESTION + Turns.TAIL, Turns.RESULT + Turns.TAIL)

#: What follows the last question is read again: its entry outlives those of answers.
TURN_AGAIN = (Turns.TAIL + 2 * Turns.ANSWER + sum(ADDED), ADDED[1])


@pytest.mark.parametrize(
    ("conversations", "tokens", "read"),
    [
        (1, 131_072, ADDED),
        (1, 262_144, ADDED),
        (2, 32_768, ADDED),
        (2, 131_072, TURN_AGAIN),
        (3, 32_768, TURN_AGAIN),
        (4, 32_768, TURN_AGAIN),
        (3, 131_072, None),
        (8, 32_768, None),
    ],
)
def test_what_twenty_gigabytes_keep(
    conversations: int, tokens: int, read: Any, snapshot_bytes: Any
):
    """docs/prompt-cache.md, of conversations that take turns; None: nearly all is read."""
    args = ModelArgs.from_dict(full_size_config()).text_config
    held = LRUPromptCache(64)
    size = partial(snapshot_bytes, args)
    some = [Turns(held, tokens, size, 20e9) for _ in range(conversations)]
    for _ in range(4):
        for one in some:
            one.turn()
    found = [one.turn() for one in some]
    for one, (first, second) in zip(some, found, strict=True):
        if read is None:
            before = len(one.tokens) - second - 2 * Turns.ANSWER
            assert first >= before - Turns.LEADING
        else:
            assert (first, second) == read
    # Bytes bind, not the number of entries.
    assert len(held) < 20


@pytest.mark.parametrize("share", [4.9, 0.1])
def test_one_conversation_goes_on_whatever_the_bound(
    model: Any, tmp_path: Path, share: float
):
    """Entries of the last request are there when the next is looked up, then trimmed."""
    (write_tk(tmp_path) / "config.json").write_text('{"model_type": "kimi_k3"}')
    tokenizer = load_tokenizer(tmp_path)
    one = sum(layer.nbytes for layer in read_by(model, [1 + i % 90 for i in range(99)]))
    options = ("--prompt-cache-bytes", str(int(share * one)))
    with serve_script(model, tokenizer, *options) as server:
        messages: list[Any] = [{"role": "system", "content": "be brief"}]
        before = 0
        for number in range(5):
            messages.append({"role": "user", "content": f"question {number}"})
            reply = server.client().chat.completions.create(
                model=MODEL, messages=list(messages), temperature=0, max_tokens=2
            )
            usage: Any = reply.usage
            assert usage.prompt_tokens_details.cached_tokens >= before
            before = usage.prompt_tokens - 1
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        assert before > 0


def held_after(model: Any, rows: int) -> tuple[int, int]:
    """Of one entry made while ``rows`` prompts were worked on: held, counted bytes."""
    before = mx.get_active_memory()
    batch = BatchGenerator(model, max_tokens=2)
    batch.insert([[1 + row] * 40 for row in range(rows)])
    entry: list[Any] = []
    while not entry:
        _, said = batch.next()
        ended = [one for one in said if one.finish_reason]
        entry = ended[0].prompt_cache or [] if ended else []
        del said, ended
    batch.close()
    del batch
    gc.collect()
    mx.eval(arrays_of(entry))
    return mx.get_active_memory() - before, sum(layer.nbytes for layer in entry)


def test_an_entry_keeps_the_rows_it_was_batched_with(model: Any, snapshot_bytes: Any):
    """mlx-lm cuts a row out of the KDA states as a view, and counts the row alone."""
    limit = mx.set_cache_limit(0)
    try:
        (alone, counted), (among, counted_among) = (
            held_after(model, rows) for rows in (1, 8)
        )
    finally:
        mx.set_cache_limit(limit)
    assert counted == counted_among
    assert alone < 1.5 * counted
    states = snapshot_bytes(model.language_model.args, 0, item=4)
    assert among - alone > 6 * states
