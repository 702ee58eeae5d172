"""An answer's ids in sections, ``think``, ``response`` and ``tools``, by its control ids.

For what is asked of ids: which sections were begun, and which ends were written. What an
answer says in them, ``read_answer`` tells. The prompt leaves a section open, which the
answer begins in. A raw completion has one section, ``text``. Only control ids are
structure: text that spells a marker is text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

THINK, RESPONSE, TOOLS, TEXT = "think", "response", "tools", "text"

_SECTIONS = (THINK, RESPONSE, TOOLS)


@dataclass
class Section:
    """Part of an answer: the ids between its tags, and whether its end was written."""

    name: str
    ids: list[int] = field(default_factory=list)
    closed: bool = False


class Markers:
    """The control ids of tags, and the names that are written between them."""

    def __init__(self, tokenizer: Any):
        names = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
        self.open, self.close, self.sep, self.end = map(
            tokenizer.convert_tokens_to_ids, names
        )
        self._tokenizer = tokenizer

    def tag_at(self, ids: Sequence[int], place: int) -> tuple[str, int] | None:
        """Name of the tag that begins at ``place``, and where what follows begins.

        None if none begins there, or if it is not complete.
        """
        if ids[place] not in (self.open, self.close):
            return None
        for end in range(place + 1, len(ids)):
            if ids[end] == self.sep:
                text = self._tokenizer.decode(list(ids[place + 1 : end]))
                return text.partition(" ")[0], end + 1
            if ids[end] in (self.open, self.close, self.end):
                return None
        return None

    def sections(self, ids: Sequence[int], begins_in: str) -> list[Section]:
        """The sections of an answer in order, the first being ``begins_in``.

        Of a raw completion, ``begins_in`` text, all is one section.
        """
        if begins_in == TEXT:
            return [Section(TEXT, list(ids))]
        found = [Section(begins_in)]
        current: Section | None = found[0]
        place = 0
        while place < len(ids):
            tag = self.tag_at(ids, place)
            opens = ids[place] == self.open
            if tag is not None and opens and _begins(tag[0], current):
                current = Section(tag[0])
                found.append(current)
            elif tag is not None and current and tag[0] == current.name and not opens:
                current.closed, current = True, None
            elif current is not None:
                current.ids.append(ids[place])
                place += 1
                continue
            elif tag is None:
                place += 1
                continue
            place = tag[1]
        return found

    def without_closing(self, ids: Sequence[int]) -> Sequence[int]:
        """``ids`` without the tags at their end that close sections and the message."""
        stop = len(ids)
        while stop and ids[stop - 1] == self.sep:
            start = stop - 1
            while start and ids[start] not in (self.open, self.close):
                start -= 1
            tag = self.tag_at(ids, start)
            if ids[start] != self.close or tag is None or tag[1] != stop:
                break
            if tag[0] not in (*_SECTIONS, "message"):
                break
            stop = start
        return ids[:stop]


def _begins(name: str, current: Section | None) -> bool:
    """Whether the tag ``name`` opens a section: also in one that was left unclosed."""
    if current is not None and current.name == TOOLS:
        return name == RESPONSE
    return name in _SECTIONS
