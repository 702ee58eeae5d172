"""Language drift: an answer goes over to a script that the question is not written in.

Of question and answer the letters are counted by script, without what is no prose of
either: code, quotations, links. A character of Chinese, Japanese or Korean counts as three
letters, for it says as much. Let f(S) be the share of the answer's letters in script S. A
script is *foreign* if less than 5 % of the question's letters are in it; those of Japanese
belong together, as long as 5 % of them are kana: without, it is Chinese. The answer drifts
if the shares of its foreign scripts sum to 20 % or more; of Latin, which names and terms of
every language use, to 75 % or more.

Answers of fewer than 20 letters, and questions of fewer than 3, are not judged. Scripts
are compared, not languages: German after an English question is no drift here, and a
translation that was asked for is one.
"""

import re

from ..build.scripts import script_counts, script_shares

LEAST_LETTERS, LEAST_QUESTION_LETTERS = 20, 3
HOME_SHARE = 0.05
FOREIGN_SHARE, FOREIGN_LATIN_SHARE = 0.20, 0.75

_LATIN = "Latin"
#: Of Japanese, and how much of it is kana at least.
_KANA, _HAN = {"Hiragana", "Katakana"}, "Han"
_KANA_SHARE = 0.05

#: Scripts whose characters are syllables or words.
_DENSE = (*_KANA, _HAN, "Hangul")

_NO_PROSE = re.compile(
    r"```.*?(?:```|\Z)"  # a block of code, to the end if it is not closed
    r"|`[^`\n]*`"
    r"|https?://\S+"
    r"|^[ ]{0,3}>[^\n]*$"  # a quoted line
    r'|"[^"\n]*"|“[^”]*”|„[^“”]*[“”]|«[^»]*»|「[^」]*」|『[^』]*』|‘[^’\n]*’',
    re.DOTALL | re.MULTILINE,
)


def prose(text: str) -> str:
    """``text`` without blocks of code, code in a line, links and quotations."""
    return _NO_PROSE.sub(" ", text)


def drifts(question: str, answer: str) -> bool | None:
    """Whether ``answer`` leaves the scripts of ``question``; None if too short to say."""
    asked, said = _letters(question), _letters(answer)
    letters = sum(said.values())
    if letters < LEAST_LETTERS or sum(asked.values()) < LEAST_QUESTION_LETTERS:
        return None
    home = {name for name, share in script_shares(asked).items() if share >= HOME_SHARE}
    if home & _KANA:
        kana = sum(said.get(name, 0) for name in _KANA)
        chinese = kana < _KANA_SHARE * (kana + said.get(_HAN, 0))
        home = home - {_HAN} if chinese else home | {*_KANA, _HAN}
    foreign = {n: c / letters for n, c in said.items() if n not in home}
    latin = foreign.pop(_LATIN, 0.0)
    return sum(foreign.values()) >= FOREIGN_SHARE or latin >= FOREIGN_LATIN_SHARE


def _letters(text: str) -> dict[str, int]:
    found = script_counts(prose(text))
    return {name: 3 * n if name in _DENSE else n for name, n in found.items()}
