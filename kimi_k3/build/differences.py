"""In words, why kept results are not those of what is asked for now."""

from collections.abc import Callable, Mapping
from typing import Any


def differences(
    words: Mapping[str, str],
    then: Mapping[str, Any],
    now: Mapping[str, Any],
    show: Callable[[Any], str] = repr,
) -> list[str]:
    """A clause for each value of ``then`` that is another one ``now``.

    Args:
        words: what each value is called. show: how one is written.
    """
    return [
        f"{words[name]} was {show(value)} and is {show(now[name])} now"
        for name, value in then.items()
        if value != now[name]
    ]
