"""Which language each document is in, as far as its writing tells."""

from collections import Counter
from typing import Any

import numpy as np

from ..build.packing import PADDING
from ..build.scripts import OTHER, script_counts

JAPANESE = "Japanese"

_KANA = ("Hiragana", "Katakana")

#: Share of kana among a text's letters from which its Han characters are Japanese.
_KANA_SHARE = 0.05


def language_of(text: str) -> str:
    """The script of most letters of ``text``; Japanese is told from Chinese by kana.

    Languages of one script, and programs, are not told apart: English, German and C are
    Latin. A text without letters is ``"other"``.
    """
    counts = script_counts(text)
    letters = sum(counts.values())
    if not letters:
        return OTHER
    kana = sum(counts[name] for name in _KANA)
    if kana >= _KANA_SHARE * letters:
        joined = Counter({JAPANESE: kana + counts["Han"]})
        counts = joined + Counter(
            {n: c for n, c in counts.items() if n not in (*_KANA, "Han")}
        )
    # Of equals the first by name, so that the answer does not depend on the text's order.
    return min(counts, key=lambda name: (-counts[name], name))


def languages_of(
    tokens: np.ndarray, documents: np.ndarray, tokenizer: Any
) -> tuple[tuple[str, ...], np.ndarray]:
    """Names in order, and the index into them of each document, (documents,) int16."""
    there = documents != PADDING
    ids, owners = tokens[there], documents[there]
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(owners.max(initial=-1) + 1))
    control = np.isin(ids, tokenizer.all_special_ids)
    found = []
    for places in np.split(order, starts[1:]):
        text = tokenizer.decode(ids[places][~control[places]].tolist())
        found.append(language_of(text))
    names = tuple(sorted(set(found)))
    return names, np.array([names.index(name) for name in found], np.int16)
