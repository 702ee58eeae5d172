"""Samples of a mix: reads its corpora, tokenises, interleaves, packs.

Only as much is read and tokenised as the samples need. The same mix, files, seed and
tokenizer always give the same samples.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import (
    ChatError,
    MixError,
    SamplesError,
    ShortCorpusError,
    TokenizerError,
)
from ..tokenizer.files import EOS_NAME, check_tokenizer_folder
from ..tokenizer.media import check_expanded
from .corpus_stream import HELD_OUT, PARTS, CorpusStream, Progress
from .documents import Document
from .mix import Mix
from .mix_file import find_mix
from .packing import Interleaved, interleave, pack, window
from .sample_rows import Samples, tokenizer_fingerprint
from .samples_report import SamplesReport, report_on

__all__ = [
    "Samples",
    "load_tokenizer",
    "make_samples",
    "make_samples_and_report",
    "open_samples",
    "tokenizer_fingerprint",
]


def make_samples(
    mix: Mix | str | Path,
    tokenizer_folder: str | Path,
    part: str = "calibration",
    *,
    progress: Progress | None = None,
) -> Samples:
    """Samples of ``mix``: a value, a TOML file, or the name of a shipped mix.

    Args:
        tokenizer_folder: a checkpoint folder, or one with the two tokenizer files.
        part: "calibration" or "held_out", which never share a document, or "all".
        progress: is told what is going on, how much is done, and of how much (or 0).

    Raises:
        MixError, SamplesError: what is wrong with the mix or its sources.
        ShortCorpusError: which corpora have too few tokens, and how many they have.
    """
    return make_samples_and_report(mix, tokenizer_folder, part, progress=progress)[0]


def make_samples_and_report(
    mix: Mix | str | Path,
    tokenizer_folder: str | Path,
    part: str = "calibration",
    *,
    progress: Progress | None = None,
) -> tuple[Samples, SamplesReport]:
    """What :func:`make_samples` gives, and a report of what was found on the way."""
    if not isinstance(mix, Mix):
        mix = find_mix(mix)
    _check_part(mix, part)
    tokenizer = load_tokenizer(tokenizer_folder)
    seen: set[str] = set()
    streams = [
        CorpusStream(corpus, mix, part, seen, _renderer(tokenizer), progress)
        for corpus in mix.corpora
    ]
    found = interleave(
        streams,
        mix.wanted,
        _encoder(tokenizer, mix.end_of_document),
        most=mix.length if mix.packing == "window" else None,
        repeat=mix.if_short == "repeat",
        tell=_teller(progress, mix.tokens),
    )
    _refuse_short(mix, part, streams, found)
    lay = window if mix.packing == "window" else pack
    padding_id = tokenizer.pad_token_id or 0
    tokens, labels, documents = lay(found.taken, mix.length, padding_id)
    samples = Samples(
        tokens,
        labels,
        documents,
        tuple(corpus.name for corpus in mix.corpora),
        tuple(found.digests),
        tokenizer_fingerprint(tokenizer),
        part,
    )
    counts = [stream.counts for stream in streams]
    return samples, report_on(samples, tokenizer, mix, counts, found.repeated)


def open_samples(
    what: str | Path,
    tokenizer_folder: str | Path,
    part: str = "calibration",
    *,
    progress: Progress | None = None,
) -> Samples:
    """Samples from an ``.npz`` file, or made of a mix: its TOML file or shipped name.

    Raises SamplesError if a file holds another part, or ids of another tokenizer.
    """
    if Path(what).suffix != ".npz":
        return make_samples(what, tokenizer_folder, part, progress=progress)
    samples = Samples.load(what)
    if samples.part != part:
        raise SamplesError(
            f"{what} holds the part {samples.part!r}, wanted {part!r}; make the file with "
            f"--part {part}."
        )
    tokenizer = load_tokenizer(tokenizer_folder)
    if samples.tokenizer != tokenizer_fingerprint(tokenizer):
        raise SamplesError(
            f"{what} was made with another tokenizer than that of {tokenizer_folder}, so "
            "its ids mean other text there; make it again with --tokenizer "
            f"{tokenizer_folder}."
        )
    return samples


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in ``folder``. Raises TokenizerError unless it is a K3's."""
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise TokenizerError(
            f"{folder} is no folder; name a checkpoint folder, or one with its "
            "tiktoken.model and tokenizer_config.json."
        )
    check_tokenizer_folder(folder)
    from ..tokenizer.tokenizer import TikTokenTokenizer

    return TikTokenTokenizer.from_pretrained(folder)


def _check_part(mix: Mix, part: str) -> None:
    if part not in PARTS:
        raise SamplesError(f"part is {part!r}; choose one of {', '.join(PARTS)}.")
    if part == HELD_OUT and not mix.held_out:
        raise MixError(
            f"{mix.origin} holds nothing out (held_out = 0), so there is no held-out "
            "part; set held_out, such as 0.1."
        )


def _renderer(tokenizer: Any) -> Callable[[Any, Any], str]:
    def render(messages: Any, tools: Any) -> str:
        if not (tools is None or isinstance(tools, list)):
            raise ChatError(f"'tools' is {type(tools).__name__}, not a list.")
        if isinstance(messages, list) and any(isinstance(m, list) for m in messages):
            raise ChatError(
                "'messages' is a list of lists; give one conversation a line."
            )
        prompt = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
        check_expanded(prompt)
        return prompt

    return render


def _encoder(tokenizer: Any, end_of_document: bool) -> Callable[[Document], np.ndarray]:
    end: list[int] = []
    if end_of_document:
        if EOS_NAME not in tokenizer.all_special_tokens:
            raise TokenizerError(
                f"the tokenizer has no {EOS_NAME} to end a text with; set "
                "end_of_document = false in the mix."
            )
        end = [tokenizer.convert_tokens_to_ids(EOS_NAME)]

    def encode(document: Document) -> np.ndarray:
        # A conversation knows its own control ids; in a text nothing may become one.
        if document.conversation:
            ids = tokenizer.encode(document.text, add_special_tokens=False)
        else:
            ids = tokenizer.encode(
                document.text, add_special_tokens=False, split_special_tokens=True
            )
            ids = ids + end
        return np.array(ids, np.int32)

    return encode


def _teller(progress: Progress | None, total: int) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda done: progress("tokens", done, total)


def _refuse_short(
    mix: Mix, part: str, streams: list[CorpusStream], found: Interleaved
) -> None:
    """Raise ShortCorpusError unless every corpus has what the mix asks of it."""
    short = [
        (stream, have, want)
        for stream, have, want in zip(streams, found.tokens, mix.wanted, strict=True)
        if have < want
    ]
    if not short:
        return
    lacking = [stream.name for stream, have, _ in short if not have]
    if mix.if_short == "accept" and not lacking and sum(found.tokens) >= mix.length:
        return
    told = "; ".join(_shortage(*one) for one in short)
    advice = "Add sources, or lower its share"
    if not lacking:
        fits = min(have * mix.tokens // want for _, have, want in short)
        if mix.packing == "pack":
            fits -= fits % mix.length
        if fits >= mix.length:
            advice += f"; tokens = {fits} would do"
        if mix.if_short == "refuse":
            advice += '; if_short = "repeat" or "accept" goes on with what there is'
    raise ShortCorpusError(f"{mix.origin}, part {part}: {told}. {advice}.")


def _shortage(stream: CorpusStream, have: int, want: int) -> str:
    counts = stream.counts
    unused = {
        "copies": counts.duplicates,
        "empty": counts.empty,
        "left out": len(counts.left_out),
    }
    notes = [f"{what}: {count}" for what, count in unused.items() if count]
    told = f"corpus {stream.name!r} has {have:,} of {want:,} tokens"
    if notes:
        told += f" ({', '.join(notes)})"
    if counts.left_out:
        told += f", the first left out: {counts.left_out[0]}"
    return told.rstrip(".")
