"""A checkpoint and samples that a calibration takes a fraction of a second for."""

from pathlib import Path
from typing import Any

import numpy as np
from tiny_k3 import write_t1

from kimi_k3.build.samples import Samples, load_tokenizer, tokenizer_fingerprint

#: Three layers: a dense KDA layer, MLA with experts, KDA with experts; two blocks.
THREE_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 3,
    "linear_attn_config": {"kda_layers": [1, 3], "full_attn_layers": [2]},
}

CORPORA = ("code", "prose", "chinese")


def write_source(folder: Path, **text: Any) -> Path:
    """A source checkpoint of three layers with tokenizer in ``folder``."""
    return write_t1(folder, tokenizer=True, **THREE_LAYERS | text)


def samples_for(
    source: Path, rows: int = 4, length: int = 12, seed: int = 0
) -> Samples:
    """Random tokens of three corpora in turn; each row but the first is padded."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 256, (rows, length))
    labels = np.arange(rows * length).reshape(rows, length) // 5 % len(CORPORA)
    for row in range(rows):
        labels[row, length - row % (length // 2) :] = -1
    tokenizer = tokenizer_fingerprint(load_tokenizer(source))
    return samples_of(tokenizer, tokens, labels)


def samples_of(tokenizer: str, tokens: np.ndarray, labels: np.ndarray) -> Samples:
    """Samples of ``tokens`` and ``labels`` (rows, length), a document a corpus."""
    count = int(labels.max()) + 1
    return Samples(
        tokens.astype(np.int32),
        labels.astype(np.int16),
        labels.astype(np.int32),
        CORPORA[:count],
        tuple(f"{i:032x}" for i in range(count)),
        tokenizer,
        "calibration",
    )


def results(out: Path) -> dict[str, bytes]:
    """What a finished calibration leaves that must not depend on how it went."""
    files = [out / "saliency.npz", *sorted((out / "moments").glob("*"))]
    return {str(path.relative_to(out)): path.read_bytes() for path in files}
