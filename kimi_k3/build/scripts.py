"""Which writing systems a text uses, and whether those are the expected ones.

A corpus that is called multilingual and is 97 % Latin calibrates one language: experts
of the others are never routed, look worthless and are pruned.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import regex

#: Unicode's names of the scripts that are told apart; the others count as OTHER.
SCRIPTS = (
    *("Latin", "Han", "Cyrillic", "Arabic", "Hiragana", "Katakana", "Hangul", "Greek"),
    *("Hebrew", "Devanagari", "Bengali", "Thai", "Tamil", "Telugu", "Kannada"),
    *("Malayalam", "Gujarati", "Gurmukhi", "Oriya", "Sinhala", "Georgian", "Armenian"),
    *("Ethiopic", "Khmer", "Lao", "Myanmar", "Tibetan", "Mongolian"),
)
OTHER = "other"

_BY_SCRIPT = {
    "Latin": "af ca cs cy da de en es et eu fi fr ga gl hr hu id is it la lt lv ms mt nl "
    "no pl pt ro sk sl sq sv sw tl tr vi",
    "Han": "zh",
    "Hiragana": "ja",
    "Hangul": "ko",
    "Cyrillic": "be bg kk ky mk mn ru sr tg uk",
    "Arabic": "ar fa ps ur",
    "Hebrew": "he yi",
    "Greek": "el",
    "Devanagari": "hi mr ne sa",
    "Bengali": "as bn",
    "Thai": "th",
    "Tamil": "ta",
    "Telugu": "te",
    "Kannada": "kn",
    "Malayalam": "ml",
    "Gujarati": "gu",
    "Gurmukhi": "pa",
    "Oriya": "or",
    "Sinhala": "si",
    "Georgian": "ka",
    "Armenian": "hy",
    "Ethiopic": "am ti",
    "Khmer": "km",
    "Lao": "lo",
    "Myanmar": "my",
    "Tibetan": "bo",
}

#: ISO 639-1 code → the script that gives the language away (of Japanese's, Hiragana).
LANGUAGES = {code: s for s, codes in _BY_SCRIPT.items() for code in codes.split()}

#: From this share of a corpus' letters on, Latin is all there is.
LATIN_ONLY = 0.97

#: Below this share of a corpus' letters, an expected script is missing.
PRESENT = 0.01

_SAYS_MANY = ("multilingual", "multi-lingual", "multi_lingual", "languages")

_LETTER = regex.compile(r"[\p{L}\p{M}]")
# Combining marks take the script of their letter, so they belong to none themselves.
_UNCOUNTED = regex.compile(r"[\p{Script=Common}\p{Script=Inherited}]")
_PATTERNS = {name: regex.compile(rf"\p{{Script={name}}}") for name in SCRIPTS}


def script_counts(text: str) -> Counter[str]:
    """How many letters of ``text`` each script has; digits and signs count nowhere."""
    counts: Counter[str] = Counter()
    for character, count in Counter(text).items():
        if script := _script(character):
            counts[script] += count
    return counts


def script_shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Share of the letters in each script, the largest first; nothing for no letters."""
    total = sum(counts.values())
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {script: count / total for script, count in ordered if count}


def script_flags(
    name: str, languages: Sequence[str], shares: Mapping[str, float]
) -> list[str]:
    """What the ``shares`` of a corpus' scripts contradict: its name or ``languages``."""
    flags = []
    latin = shares.get("Latin", 0.0)
    expected: dict[str, list[str]] = {}
    for code in languages:
        expected.setdefault(LANGUAGES[code], []).append(code)
    many = any(word in name.lower() for word in _SAYS_MANY)
    if latin >= LATIN_ONLY and (many or any(s != "Latin" for s in expected)):
        claim = (
            "its name says" if many else f"its languages ({', '.join(languages)}) say"
        )
        flags.append(
            f"{name}: {latin:.1%} of its letters are Latin, while {claim} more scripts; "
            "experts of the other languages would look unused."
        )
    missing = [s for s in expected if shares.get(s, 0.0) < PRESENT]
    for script in missing:
        flags.append(
            f"{name}: {script} ({', '.join(expected[script])}) is expected and is "
            f"{shares.get(script, 0.0):.1%} of its letters."
        )
    return flags


@cache
def _script(character: str) -> str | None:
    if not _LETTER.match(character) or _UNCOUNTED.match(character):
        return None
    for name, pattern in _PATTERNS.items():
        if pattern.match(character):
            return name
    return OTHER
