"""Samples: rows of tokens that know which corpus and document each token is from.

Calibration and evaluation run on these. Two sets are kept apart by the hashes of their
documents, whatever mixes they were made from.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import OverlapError, SamplesError
from .corpus_stream import PARTS
from .packing import PADDING
from .sealed_npz import digest_of, read_sealed, write_sealed

KIND, VERSION = "kimi-k3 samples", 1

_REMEDY = "Make it again with `kimi-k3 samples MIX --tokenizer SOURCE --out FILE`."

_ARRAYS = {"tokens": np.int32, "labels": np.int16, "documents": np.int32}


@dataclass(frozen=True, eq=False)
class Samples:
    """Rows of tokens. Arrays cannot be written to.

    Args:
        tokens: ids, (rows, length) int32.
        labels: index into ``corpora``, (rows, length) int16; -1 where there is no token,
            which is only at the end of a row.
        documents: index into ``document_hashes``, (rows, length) int32; -1 likewise.
        corpora: their names, each with at least one token.
        document_hashes: of each document's whole text, 32 hex digits.
        tokenizer: fingerprint of the vocabulary, see :func:`tokenizer_fingerprint`.
        part: "calibration", "held_out" or "all".

    Raises SamplesError if there is no token, or if these contradict each other.
    """

    tokens: np.ndarray
    labels: np.ndarray
    documents: np.ndarray
    corpora: tuple[str, ...]
    document_hashes: tuple[str, ...]
    tokenizer: str
    part: str

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array = getattr(self, name)
            if array.dtype != dtype or array.ndim != 2:
                raise SamplesError(
                    f"{name} are {array.dtype} of shape {array.shape}; samples have "
                    f"{np.dtype(dtype)} of shape (rows, length)."
                )
            if array.shape != self.tokens.shape:
                raise SamplesError(
                    f"{name} have shape {array.shape}, tokens {self.tokens.shape}; "
                    f"they must be equal. {_REMEDY}"
                )
            # The caller's array stays the caller's; nothing changes after a fingerprint.
            array = array.copy()
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        self._check_padding()
        self._check_names()

    def _check_padding(self) -> None:
        padding = self.labels == PADDING
        if not padding.size or padding.all():
            raise SamplesError(
                f"samples of {self.tokens.shape[0]} rows hold no token"
                f"{', only padding' if padding.size else ''}. {_REMEDY}"
            )
        if padding[:, 0].any():
            row = int(padding[:, 0].argmax())
            raise SamplesError(
                f"row {row} begins with padding; rows are padded at their end only, and "
                f"none is padding only. {_REMEDY}"
            )
        if (padding[:, :-1] & ~padding[:, 1:]).any():
            raise SamplesError(f"a token follows padding within a row. {_REMEDY}")
        if ((self.documents == PADDING) != padding).any():
            raise SamplesError(
                f"labels and documents disagree about what is padding. {_REMEDY}"
            )
        if self.tokens.min() < 0:
            raise SamplesError(f"token id {self.tokens.min()} is negative. {_REMEDY}")

    def _check_names(self) -> None:
        if self.part not in PARTS:
            raise SamplesError(
                f"part is {self.part!r}; it is one of {', '.join(PARTS)}."
            )
        for what, names, indices in (
            ("corpora", self.corpora, self.labels),
            ("document_hashes", self.document_hashes, self.documents),
        ):
            if twice := [name for name, count in Counter(names).items() if count > 1]:
                raise SamplesError(f"{what} name {twice[0]!r} twice. {_REMEDY}")
            used = np.unique(indices[indices != PADDING])
            if not np.array_equal(used, np.arange(len(names))):
                raise SamplesError(
                    f"there are {len(names)} {what}, and tokens of {len(used)}; each "
                    f"must have a token. {_REMEDY}"
                )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """Tokens a row, padding included."""
        return self.tokens.shape[1]

    @cached_property
    def tokens_per_corpus(self) -> np.ndarray:
        """Tokens of each of ``corpora``, (corpora,) int64, without padding."""
        labels = self.labels[self.labels != PADDING]
        return np.bincount(labels, minlength=len(self.corpora)).astype(np.int64)

    @cached_property
    def corpus_of_document(self) -> np.ndarray:
        """Index into ``corpora`` of each of ``document_hashes``, (documents,) int16."""
        owner = np.empty(len(self.document_hashes), np.int16)
        there = self.labels != PADDING
        owner[self.documents[there]] = self.labels[there]
        return owner

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, as hex, of all that these samples are."""
        return digest_of(self._content())

    def refuse_overlap(
        self, hashes: Iterable[str], of: str = "the other samples"
    ) -> None:
        """Raise OverlapError if any document is one of ``hashes``, which are ``of``."""
        shared = set(hashes) & set(self.document_hashes)
        if not shared:
            return
        owners = zip(self.document_hashes, self.corpus_of_document, strict=True)
        counts = Counter(self.corpora[i] for digest, i in owners if digest in shared)
        where = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise OverlapError(
            f"{len(shared)} of {len(self.document_hashes)} documents ({where}) are also "
            f"among those of {of}, so a figure from the one would not judge the other. "
            "Make one with --part calibration and the other with --part held_out, from "
            "mixes of equal held_out."
        )

    def save(self, path: str | Path) -> None:
        """Write all to the file ``path`` (``.npz``), whole or not at all."""
        write_sealed(path, KIND, VERSION, self._content())

    @classmethod
    def load(cls, path: str | Path) -> "Samples":
        """What :meth:`save` wrote. Raises SamplesError for anything else."""
        arrays = read_sealed(path, KIND, VERSION, SamplesError, _REMEDY)
        try:
            about: dict[str, Any] = json.loads(str(arrays["about"]))
            return cls(
                **{name: arrays[name] for name in _ARRAYS},
                corpora=tuple(about["corpora"]),
                document_hashes=tuple(about["document_hashes"]),
                tokenizer=about["tokenizer"],
                part=about["part"],
            )
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, SamplesError):
                raise SamplesError(f"{path}: {error}") from error
            raise SamplesError(f"{path} lacks {error}. {_REMEDY}") from error

    def _content(self) -> dict[str, np.ndarray]:
        about = {
            "corpora": self.corpora,
            "document_hashes": self.document_hashes,
            "tokenizer": self.tokenizer,
            "part": self.part,
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return {**arrays, "about": np.array(json.dumps(about, sort_keys=True))}


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256, as hex, of a K3 tokenizer's vocabulary file and its control names."""
    content = hashlib.sha256(Path(tokenizer.vocab_file).read_bytes())
    content.update(json.dumps(tokenizer.all_special_tokens).encode())
    return content.hexdigest()
