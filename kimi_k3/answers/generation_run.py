"""Answers of a model to prompts, one at a time, through mlx-lm's own generation.

An answer depends on the model, its prompt and its seed, and on nothing that runs before
or beside it: in a batch the roundings of one answer would depend on the others. Its seed
comes from the run's seed, what is asked, the setting and the answer's number.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .answers import Answer
from .generation_prompts import Prompt
from .stops import LENGTH

#: Characters of a question that an answer's line shows.
_SHOWN = 200


@dataclass(frozen=True)
class Setting:
    """How tokens are drawn. ``temperature`` 0 takes the likeliest."""

    name: str
    temperature: float
    top_p: float | None = None

    def to_dict(self) -> dict[str, float]:
        found = {"temperature": self.temperature}
        return found if self.top_p is None else {**found, "top_p": self.top_p}


#: Kimi K3's own sampling, and the likeliest token each time, which is one answer.
SAMPLED = Setting("sampled", 1.0, 0.95)
GREEDY = Setting("greedy", 0.0)
SETTINGS = {setting.name: setting for setting in (GREEDY, SAMPLED)}


@dataclass(frozen=True)
class Job:
    """One answer that is to be given."""

    prompt: Prompt
    setting: Setting
    number: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        """As :attr:`Answer.job`."""
        prompt = self.prompt
        asked = prompt.corpus, prompt.number, prompt.digest
        return *asked, self.setting.name, self.number, self.seed


def jobs(
    prompts: Sequence[Prompt], settings: Sequence[Setting], answers: int, seed: int
) -> list[Job]:
    """Every answer that is wanted: one of a greedy setting, else ``answers`` a prompt."""
    return [
        Job(prompt, setting, number, seed_of(seed, prompt.digest, setting.name, number))
        for prompt in prompts
        for setting in settings
        for number in range(answers if setting.temperature else 1)
    ]


def seed_of(seed: int, digest: str, setting: str, number: int) -> int:
    """53 bits, which every reader of JSON keeps."""
    text = f"{seed} {digest} {setting} {number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 11


def answer(model: Any, tokenizer: Any, job: Job, max_tokens: int) -> Answer:
    """Let ``model`` answer; ``tokenizer`` is mlx-lm's wrapper, as ``load`` gives it."""
    ids, end = [], None
    for token, finished in _tokens(model, tokenizer, job, max_tokens):
        if finished == "stop":
            end = token
        else:
            ids.append(token)
    prompt = job.prompt
    return Answer(
        corpus=prompt.corpus,
        prompt=prompt.number,
        setting=job.setting.name,
        number=job.number,
        seed=job.seed,
        stop=LENGTH if end is None else tokenizer.convert_ids_to_tokens(end),
        text=tokenizer.decode(ids),
        ids=tuple(ids),
        question=prompt.question[:_SHOWN],
        digest=prompt.digest,
    )


def _tokens(
    model: Any, tokenizer: Any, job: Job, max_tokens: int
) -> Iterator[tuple[int, str | None]]:
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    setting = job.setting
    sampler = make_sampler(temp=setting.temperature, top_p=setting.top_p or 0.0)
    mx.random.seed(job.seed)
    for found in stream_generate(
        model, tokenizer, list(job.prompt.ids), max_tokens, sampler=sampler
    ):
        yield found.token, found.finish_reason
