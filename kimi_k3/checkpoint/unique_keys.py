"""JSON objects that name no key twice: readers disagree on which of two values counts."""

from collections import Counter
from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of ``pairs``, for ``json.loads(…, object_pairs_hook=unique_keys)``.

    Raises ValueError naming a key that comes twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {ascii(twice)[:60]} is named twice")
    return found
