"""How an answer ends: by itself on an end id, or cut by length; and in which section.

*Ends by itself* is the share of answers to conversations that reach an end id within the
tokens they may have. A text goes on as long as it likes, so of raw completions it is not
told. *Open section* is the share of answers that end inside a section whose end was not
written: thinking or calling tools when the length cuts, or an end id in mid-section.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .generation_sections import TEXT, Section

LENGTH = "length"


@dataclass(frozen=True)
class Stop:
    """How one answer ended.

    Attributes:
        by_itself: on an end id.
        reason: the name of that id, or "length".
        open_section: the section that was not closed; None if all were.
    """

    by_itself: bool
    reason: str
    open_section: str | None


def stop_of(end_name: str | None, sections: Sequence[Section]) -> Stop:
    """``end_name`` is the name of the end id, None for an answer cut by length."""
    last = sections[-1]
    is_open = last.name != TEXT and not last.closed
    return Stop(
        by_itself=end_name is not None,
        reason=LENGTH if end_name is None else end_name,
        open_section=last.name if is_open else None,
    )
