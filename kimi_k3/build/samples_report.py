"""What samples are made of: shares, documents, scripts, and what looks wrong."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..tokenizer.files import CONTROL_IDS
from .corpus_stream import Counts
from .mix import Corpus, Mix
from .sample_rows import Samples
from .scripts import script_counts, script_flags, script_shares

#: A share that is off by more than this is flagged.
SHARE_OFF = 0.01

#: A corpus of fewer documents says little about its kind of text.
FEW_DOCUMENTS = 3

_SCRIPTS_SHOWN, _SCRIPT_SHOWN_FROM, _LEFT_OUT_SHOWN = 4, 0.005, 3


@dataclass(frozen=True)
class CorpusReport:
    """One corpus of samples. ``wanted`` and ``share_wanted`` are None without a mix.

    Args:
        bytes_per_token: of text; control ids count nowhere. 0 if there is no text.
        scripts: script and share of the letters, the largest first.
        duplicates: documents that were met before, in this corpus or another.
        left_out: files and conversations that could not be used, and why.
        repeated: times that a document was laid again.
    """

    name: str
    tokens: int
    share: float
    wanted: int | None
    share_wanted: float | None
    documents: int
    bytes_per_token: float
    scripts: tuple[tuple[str, float], ...]
    duplicates: int = 0
    empty: int = 0
    repeated: int = 0
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplesReport:
    """All that is worth knowing of samples before hours are spent on them."""

    origin: str
    part: str
    rows: int
    length: int
    tokens: int
    fingerprint: str
    corpora: tuple[CorpusReport, ...]
    flags: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """The report for a reader: a table, then what to look at."""
        padding = self.rows * self.length - self.tokens
        padded = f", {padding:,} padding" if padding else ""
        lines = [
            f"{self.origin}, part {self.part}",
            f"{self.rows:,} rows of {self.length:,}: {self.tokens:,} tokens{padded}",
            f"fingerprint {self.fingerprint}",
            "",
            *_table(self.corpora),
        ]
        for corpus in self.corpora:
            lines += _unused(corpus)
        lines += [f"note: {note}" for note in self.notes]
        lines += [f"flag: {flag}" for flag in self.flags]
        if not self.flags:
            lines.append("Nothing looks odd.")
        return "\n".join(lines)


def report_on(
    samples: Samples,
    tokenizer: Any,
    mix: Mix | None = None,
    counts: Sequence[Counts] | None = None,
    repeated: Sequence[int] | None = None,
    origin: str | Path = "samples",
) -> SamplesReport:
    """Look at ``samples``. What ``mix`` asked for is compared if it is given.

    ``counts`` and ``repeated`` (for each corpus) are known where samples are made.
    """
    shares = samples.tokens_per_corpus / samples.tokens_per_corpus.sum()
    corpora = []
    for i, name in enumerate(samples.corpora):
        bytes_per_token, scripts = _text_of(samples, tokenizer, i)
        met = counts[i] if counts else Counts()
        corpora.append(
            CorpusReport(
                name=name,
                tokens=int(samples.tokens_per_corpus[i]),
                share=float(shares[i]),
                wanted=mix.wanted[i] if mix else None,
                share_wanted=mix.shares[i] if mix else None,
                documents=int((samples.corpus_of_document == i).sum()),
                bytes_per_token=bytes_per_token,
                scripts=tuple(scripts.items()),
                duplicates=met.duplicates,
                empty=met.empty,
                repeated=repeated[i] if repeated else 0,
                left_out=tuple(met.left_out),
            )
        )
    asked = mix.corpora if mix else [None] * len(corpora)
    return SamplesReport(
        origin=mix.origin if mix else str(origin),
        part=samples.part,
        rows=samples.rows,
        length=samples.length,
        tokens=int(samples.tokens_per_corpus.sum()),
        fingerprint=samples.fingerprint,
        corpora=tuple(corpora),
        flags=tuple(
            f for pair in zip(corpora, asked, strict=True) for f in _flags(*pair)
        ),
        notes=mix.notes if mix else (),
    )


def _text_of(
    samples: Samples, tokenizer: Any, corpus: int
) -> tuple[float, dict[str, float]]:
    """Bytes per token and script shares of the ordinary text in ``corpus``."""
    first_control = len(tokenizer) - CONTROL_IDS
    chosen = samples.tokens[samples.labels == corpus]
    ids: list[int] = chosen[chosen < first_control].tolist()
    data = tokenizer.bytes_of(ids)
    shares = script_shares(script_counts(data.decode("utf-8", "ignore")))
    return len(data) / max(len(ids), 1), shares


def _flags(report: CorpusReport, corpus: Corpus | None) -> Iterable[str]:
    languages = corpus.languages if corpus else ()
    yield from script_flags(report.name, languages, dict(report.scripts))
    if report.share_wanted is not None:
        off = report.share - report.share_wanted
        if abs(off) > SHARE_OFF:
            yield (
                f"{report.name}: {report.share:.1%} of the tokens instead of "
                f"{report.share_wanted:.1%}; what is weighed by tokens is off by as much."
            )
    if report.documents < FEW_DOCUMENTS:
        yield (
            f"{report.name}: all of it comes from {report.documents} "
            f"document{'s' if report.documents > 1 else ''}; more tokens would bring more."
        )
    if report.repeated:
        yield (
            f"{report.name}: documents were laid again {report.repeated} times, for there "
            f"are only {report.documents}; what they route to counts again."
        )


def _table(corpora: Sequence[CorpusReport]) -> list[str]:
    width = max(len("corpus"), *(len(corpus.name) for corpus in corpora))
    lines = [
        f"{'corpus':{width}}  {'tokens':>11}  {'share':>6}  {'wanted':>6}  "
        f"{'documents':>9}  {'bytes/token':>11}  scripts"
    ]
    for corpus in corpora:
        wanted = "" if corpus.share_wanted is None else f"{corpus.share_wanted:.1%}"
        shown = [
            f"{script} {share:.1%}"
            for script, share in corpus.scripts[:_SCRIPTS_SHOWN]
            if share >= _SCRIPT_SHOWN_FROM
        ]
        lines.append(
            f"{corpus.name:{width}}  {corpus.tokens:>11,}  {corpus.share:>6.1%}  "
            f"{wanted:>6}  {corpus.documents:>9,}  {corpus.bytes_per_token:>11.2f}  "
            f"{', '.join(shown) or 'no letters'}"
        )
    return [*lines, ""]


def _unused(corpus: CorpusReport) -> list[str]:
    told = [
        f"{what}: {count:,}"
        for what, count in (
            ("dropped as copies", corpus.duplicates),
            ("empty", corpus.empty),
            ("left out", len(corpus.left_out)),
        )
        if count
    ]
    lines = [f"{corpus.name}: {', '.join(told)}"] if told else []
    lines += [f"  {reason}" for reason in corpus.left_out[:_LEFT_OUT_SHOWN]]
    if (more := len(corpus.left_out) - _LEFT_OUT_SHOWN) > 0:
        lines.append(f"  … and {more:,} more")
    return lines
