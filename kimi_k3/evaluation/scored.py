"""Which predictions of a set of samples are judged, and what each of them is of.

A prediction is judged if the predicted token and the one before it belong to the same
document, and that one does not end it: what begins a document, or a row, is nothing that
a model could know.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..build.packing import PADDING
from ..build.sample_rows import Samples
from ..errors import EvaluationError
from ..tokenizer.files import EOS_NAME
from .languages import languages_of
from .spans import spans_of


@dataclass(frozen=True, eq=False)
class Scored:
    """N predictions in the order of rows and places; one array of (N,) each.

    Attributes:
        rows, columns: where the token stands from which the next one is predicted.
        targets: the id that is to be predicted.
        corpus: index into ``corpora``.
        document: index into the samples' ``document_hashes``.
        span: index into :data:`~kimi_k3.evaluation.spans.SPANS`, of the predicted token.
        language: index into ``languages``, of the document.
        position: tokens of the document that the model sees in this row, from 1.
    """

    rows: np.ndarray
    columns: np.ndarray
    targets: np.ndarray
    corpus: np.ndarray
    document: np.ndarray
    span: np.ndarray
    language: np.ndarray
    position: np.ndarray
    corpora: tuple[str, ...]
    languages: tuple[str, ...]

    @classmethod
    def of(cls, samples: Samples, tokenizer: Any) -> Self:
        """What is judged of ``samples``; raises EvaluationError if that is nothing."""
        documents = samples.documents
        same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] != PADDING)
        if EOS_NAME in tokenizer.all_special_tokens:
            # A document that is repeated begins again behind its end.
            end = tokenizer.convert_tokens_to_ids(EOS_NAME)
            same &= samples.tokens[:, :-1] != end
        rows, columns = np.nonzero(same)
        if not len(rows):
            raise EvaluationError(
                "the samples hold no two tokens of one document in a row, so there is "
                "nothing to predict. Make longer rows."
            )
        after = rows, columns + 1
        document = documents[after]
        spans = spans_of(samples.tokens, documents, tokenizer)
        languages, language = languages_of(samples.tokens, documents, spans, tokenizer)
        return cls(
            rows=rows.astype(np.int32),
            columns=columns.astype(np.int32),
            targets=samples.tokens[after],
            corpus=samples.labels[after],
            document=document,
            span=spans[after],
            language=language[document],
            position=_seen(documents)[rows, columns],
            corpora=samples.corpora,
            languages=languages,
        )


def _seen(documents: np.ndarray) -> np.ndarray:
    """Tokens of its document up to and with each token in its row, (rows, length)."""
    length = documents.shape[1]
    starts = np.zeros(documents.shape, bool)
    starts[:, 0] = True
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = np.broadcast_to(np.arange(length), documents.shape)
    first = np.maximum.accumulate(np.where(starts, places, 0), axis=1)
    return (places - first + 1).astype(np.int32)
