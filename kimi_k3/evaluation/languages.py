"""Which language each document is in, as far as its writing tells."""

from collections import Counter
from typing import Any

import numpy as np

from ..build.packing import PADDING
from ..build.scripts import OTHER, script_counts
from .spans import SPANS

JAPANESE = "Japanese"

#: Spans whose words tell the language.
_SAID = ("user", "think", "response", "text")

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
    tokens: np.ndarray, documents: np.ndarray, spans: np.ndarray, tokenizer: Any
) -> tuple[tuple[str, ...], np.ndarray]:
    """Names in order, and the index into them of each document, (documents,) int16.

    Of a conversation what people and the model say decides: the words of tags and of
    declared tools are English in every one. All arguments but the last are (rows,
    length).
    """
    there = documents != PADDING
    ids, owners, kinds = tokens[there], documents[there], spans[there]
    order = np.argsort(owners, kind="stable")
    starts = np.searchsorted(owners[order], np.arange(owners.max(initial=-1) + 1))
    control = np.isin(ids, tokenizer.all_special_ids)
    said = np.isin(kinds, [SPANS.index(name) for name in _SAID])
    found = []
    for places in np.split(order, starts[1:]):
        text = places[~control[places] & ~_in_tags(ids[places], tokenizer)]
        kept = text[said[text]] if said[text].any() else text
        found.append(language_of(tokenizer.decode(ids[kept].tolist())))
    names = tuple(sorted(set(found)))
    return names, np.array([names.index(name) for name in found], np.int16)


def _in_tags(ids: np.ndarray, tokenizer: Any) -> np.ndarray:
    """Which of ``ids`` (N,) are written between a marker that begins a tag and its end."""
    begins, ends = (
        np.isin(ids, tokenizer.convert_tokens_to_ids(list(names)))
        for names in (("<|open|>", "<|close|>"), ("<|sep|>", "<|end_of_msg|>"))
    )
    places = np.arange(1, len(ids) + 1)
    last = [np.maximum.accumulate(places * mark) for mark in (begins, ends)]
    return last[0] > last[1]
