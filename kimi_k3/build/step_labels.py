"""Which corpus each token of one step belongs to, as the recorders need it."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..errors import CalibrationError

#: The label of a token that is only there to fill a row up.
PADDING = -1


@dataclass(frozen=True)
class StepLabels:
    """The corpora of the tokens that go through a layer together.

    ``corpus`` (tokens,) counts row by row; a token of :data:`PADDING` is recorded
    nowhere. Raises CalibrationError for a label that is none of the ``corpora``.
    """

    corpus: np.ndarray
    corpora: int
    one_hot: mx.array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        flat = np.asarray(self.corpus).reshape(-1).astype(np.int64)
        if flat.size and not PADDING <= flat.min() <= flat.max() < self.corpora:
            raise CalibrationError(
                f"labels run from {flat.min()} to {flat.max()}, but there are "
                f"{self.corpora} corpora (and {PADDING} for padding). Make the samples "
                "again."
            )
        object.__setattr__(self, "corpus", flat)
        hot = np.zeros((self.corpora, flat.size), np.float32)
        used = np.flatnonzero(flat != PADDING)
        hot[flat[used], used] = 1
        # (corpora, tokens): a product with it sums over the tokens of each corpus.
        object.__setattr__(self, "one_hot", mx.array(hot))
