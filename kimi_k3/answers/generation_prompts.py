"""What a build is asked: conversations up to their last question, beginnings of texts.

Of a conversation the prompt is everything up to and with its last user or tool message,
rendered by the model's own template with its tools, ready for the answer. Where that is
the result of a tool, the last user message is a prompt too, since it asks for the call. Of
a text it is the first tokens, as a raw completion. A prompt that was met before is not
asked again.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..build.corpus_stream import ALL, HELD_OUT, PARTS, CorpusStream
from ..build.documents import Document, document
from ..build.mix import Chats, Corpus, Mix
from ..build.mix_file import find_mix
from ..errors import ChatError, EvaluationError
from ..tokenizer.media import check_expanded
from ..tokenizer.messages import read_conversation
from .generation_sections import TEXT, THINK
from .tool_calls import ToolChecker

#: Prompts of a corpus, and tokens of a text that are its prompt, unless told otherwise.
PROMPTS, PROMPT_TOKENS = 100, 64


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        corpus: its name. number: of the prompt in its corpus, from 0.
        ids: what the model reads.
        begins_in: the section that the answer begins in: "think", or "text" of a raw
            completion.
        question: the last user message, or the text itself.
        tools: what is offered, as chat APIs take it.
    """

    corpus: str
    number: int
    ids: tuple[int, ...]
    begins_in: str
    question: str
    tools: tuple[Any, ...] = ()

    @cached_property
    def digest(self) -> str:
        """32 hex digits of what is asked, whatever the corpus and the number."""
        content = [self.ids, self.begins_in, self.question, self.tools]
        text = json.dumps(content, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    @property
    def is_conversation(self) -> bool:
        return self.begins_in != TEXT


@dataclass(frozen=True)
class Prompts:
    """Prompts in the order of corpora; ``notes`` are remarks for a reader."""

    prompts: tuple[Prompt, ...]
    notes: tuple[str, ...] = ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, as hex, of all of them."""
        found = hashlib.sha256()
        for prompt in self.prompts:
            found.update(f"{prompt.corpus} {prompt.number} {prompt.digest}\n".encode())
        return found.hexdigest()


def read_prompts(
    what: Mix | str | Path,
    tokenizer: Any,
    *,
    part: str = HELD_OUT,
    limit: int = PROMPTS,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Prompts:
    """The prompts of a mix, its TOML file or shipped name, or of a JSONL file of chats.

    Args:
        tokenizer: a Kimi K3's.
        part: which part of a mix; a file of chats is taken as it is.
        limit: prompts a corpus, at most.
        prompt_tokens: tokens of a text that are its prompt; of a text that has fewer
            than twice as many, half of them.

    Raises MixError and SamplesError for sources that cannot be read, EvaluationError for
    tools without a schema or if there is no prompt at all.
    """
    for name, value in (("limit", limit), ("prompt_tokens", prompt_tokens)):
        if value < 1:
            raise EvaluationError(f"{name} is {value}; it is at least 1.")
    mix, part = _open(what, part)
    reader = _Reader(tokenizer, prompt_tokens)
    seen: set[str] = set()
    prompts: list[Prompt] = []
    notes: list[str] = []
    for corpus in mix.corpora:
        stream = CorpusStream(corpus, mix, part, seen, reader.render)
        found, more = _take(stream, reader, corpus.name, limit)
        prompts += found
        if more:
            notes.append(
                f"{corpus.name}: {limit} prompts of more that there are (--limit)."
            )
        if stream.counts.left_out:
            left_out = stream.counts.left_out
            notes.append(f"{len(left_out)} left out, the first: {left_out[0]}")
        if not found:
            notes.append(f"{corpus.name}: no prompt in the part {part}.")
    if not prompts:
        raise EvaluationError(f"{what} holds no prompt. {' '.join(notes)}")
    return Prompts(tuple(prompts), tuple(notes))


class _Reader:
    """Makes prompts of documents; of a conversation it remembers what was rendered."""

    def __init__(self, tokenizer: Any, prompt_tokens: int):
        self._tokenizer = tokenizer
        self._prompt_tokens = prompt_tokens
        self._sessions: dict[str, tuple[Any, Any]] = {}
        self._seen: set[str] = set()
        self._checked: set[str] = set()

    def render(self, messages: Any, tools: Any) -> str:
        """The whole session, by which it is told whether it is held out."""
        if not (tools is None or isinstance(tools, list)):
            raise ChatError(f"'tools' is {type(tools).__name__}, not a list.")
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False
        )
        check_expanded(text)
        if not any(m.role in ("user", "tool") for m in read_conversation(messages)):
            raise ChatError("no user or tool message, so there is nothing to answer.")
        if (found := document(text)) is not None:
            self._sessions[found.digest] = messages, tools
        return text

    def prompts(self, found: Document, corpus: str, number: int) -> Iterator[Prompt]:
        """Those of a document that were not met before, counted from ``number``."""
        of = self._of_session if found.conversation else self._of_text
        for prompt in of(found, corpus):
            if prompt.digest not in self._seen:
                self._seen.add(prompt.digest)
                self._check_tools(prompt)
                yield replace(prompt, number=number)
                number += 1

    def _of_session(self, found: Document, corpus: str) -> Iterator[Prompt]:
        messages, tools = self._sessions.pop(found.digest)
        roles = [message["role"] for message in messages]
        users = [place for place, role in enumerate(roles) if role == "user"]
        results = [place for place, role in enumerate(roles) if role == "tool"]
        for last in sorted({*users[-1:], max(users[-1:] + results[-1:])}):
            asked = read_conversation(messages[: last + 1])
            questions = [m.text for m in asked if m.role == "user"]
            ids = self._tokenizer.apply_chat_template(
                messages[: last + 1], tools=tools, add_generation_prompt=True
            )
            later = [tool for message in asked for tool in message.tools]
            yield Prompt(
                corpus,
                0,
                tuple(ids),
                THINK,
                questions[-1] if questions else "",
                (*(tools or ()), *later),
            )

    def _of_text(self, found: Document, corpus: str) -> Iterator[Prompt]:
        ids = self._tokenizer.encode(
            found.text, add_special_tokens=False, split_special_tokens=True
        )
        ids = ids[: min(self._prompt_tokens, len(ids) // 2)]
        if ids:
            yield Prompt(corpus, 0, tuple(ids), TEXT, self._tokenizer.decode(ids))

    def _check_tools(self, prompt: Prompt) -> None:
        """Refuse, before hours of answers, tools that no call could be judged by."""
        key = json.dumps(prompt.tools, sort_keys=True)
        if prompt.tools and key not in self._checked:
            ToolChecker(prompt.tools, f"{prompt.corpus}, prompt {prompt.number}")
            self._checked.add(key)


def _open(what: Mix | str | Path, part: str) -> tuple[Mix, str]:
    if part not in PARTS:
        raise EvaluationError(f"part is {part!r}; choose one of {', '.join(PARTS)}.")
    if isinstance(what, Mix):
        mix = what
    elif Path(what).suffix.lower() == ".npz":
        raise EvaluationError(
            f"{what} holds rows of tokens, in which no prompt can be told from its "
            "answer. Name the mix that it was made of, or a JSONL file of chats."
        )
    elif Path(what).suffix.lower() == ".jsonl":
        path = Path(what).expanduser().absolute()
        corpus = Corpus(path.stem, 1.0, Chats((str(path),)))
        # Rows are not made of it; these are the least that a mix may ask for.
        return Mix(tokens=2, length=2, corpora=(corpus,), origin=str(what)), ALL
    else:
        mix = find_mix(what)
    if part == HELD_OUT and not mix.held_out:
        raise EvaluationError(
            f"{mix.origin} holds nothing out (held_out = 0). Name --part all to ask all "
            "of it."
        )
    return mix, part


def _take(
    stream: CorpusStream, reader: _Reader, corpus: str, limit: int
) -> tuple[list[Prompt], bool]:
    """The first ``limit`` prompts of a corpus, and whether there are more."""
    found: list[Prompt] = []
    while len(found) <= limit and (text := stream.next()) is not None:
        found += reader.prompts(text, corpus, len(found))
    return found[:limit], len(found) > limit
