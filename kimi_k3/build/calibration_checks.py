"""What is looked at before a calibration reads any weights: hours depend on it."""

import hashlib
from pathlib import Path

from ..config import TextArgs
from ..errors import CalibrationError, ConfigError
from .layer_stream import LayerStream
from .mix_file import find_mix
from .samples import Samples, load_tokenizer, tokenizer_fingerprint

#: A row of one token would take the way of decoding, on which other things are read.
SHORTEST_ROW = 2


def check_source(args: TextArgs) -> None:
    """Refuse a checkpoint of which nothing can be recorded; ConfigError says why."""
    if not any(args.experts_in_layer(i) for i in range(args.num_hidden_layers)):
        raise ConfigError(
            "no layer of this checkpoint has routed experts: there is nothing to "
            "calibrate. Name the checkpoint that is to be pruned."
        )
    if args.expert_top_p is not None:
        raise ConfigError(
            f"config.json sets expert_top_p ({args.expert_top_p}), which leaves out "
            "experts that the router picked: they would seem to matter less than they "
            "do. Remove the key to calibrate."
        )


def check_samples(samples: Samples, stream: LayerStream) -> None:
    """Refuse samples that do not fit the checkpoint, or from which nothing is learnt.

    Raises CalibrationError.
    """
    if samples.length < SHORTEST_ROW:
        raise CalibrationError(
            f"rows are of {samples.length} token; at least {SHORTEST_ROW} are needed. "
            "Make samples of longer rows."
        )
    for name, tokens in zip(samples.corpora, samples.tokens_per_corpus, strict=True):
        if not tokens:
            raise CalibrationError(
                f"the samples hold no token of corpus {name!r}: every expert would seem "
                "useless to it. Make them again."
            )
    fingerprint = tokenizer_fingerprint(load_tokenizer(stream.folder.path))
    if samples.tokenizer != fingerprint:
        raise CalibrationError(
            f"the samples were made with another tokenizer ({samples.tokenizer[:12]}) than "
            f"that of {stream.folder.path} ({fingerprint[:12]}): its ids mean other text "
            "there. Make them again with the source's own."
        )
    highest = int(samples.tokens.max())
    if highest >= stream.args.vocab_size:
        raise CalibrationError(
            f"the samples hold token id {highest}, but config.json's vocab_size is "
            f"{stream.args.vocab_size}. Make them again with the source's own tokenizer."
        )


def request_of(samples: Samples | str | Path) -> str:
    """What is asked for, in few letters: the same for the same mix or samples."""
    if isinstance(samples, Samples):
        return f"samples {samples.fingerprint}"
    if Path(samples).suffix == ".npz":
        return f"samples {Samples.load(samples).fingerprint}"
    mix = repr(find_mix(samples))
    return f"mix {hashlib.sha256(mix.encode()).hexdigest()}"
