"""JSON that can be written again: what a model wrote must not break a host's reply."""

import json
from typing import Any

#: Nesting that every reader and writer manages, wherever in its own calls it stands.
MAX_DEPTH = 100


def read_json(text: str) -> Any:
    """The value of ``text``; raises ValueError for all that a reply cannot carry.

    Those are, beside what is no JSON: NaN and infinities, numbers beyond a float's or
    Python's own limit of digits, halves of surrogate pairs, and more than MAX_DEPTH
    levels.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_depth(value)
    # json reads NaN and 1e999, and halves of surrogate pairs, which no UTF-8 has.
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise ValueError(f"nested in more than {MAX_DEPTH} levels")


def _inside(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
