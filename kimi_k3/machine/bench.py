"""``kimi-k3 bench``: time a model as mlx-lm runs it, and hold it against the memory.

Decoding reads weights and does little else, so its speed is judged by the bytes that a
token needs: their rate is given as a share of what a plain read reaches on this machine.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..errors import KimiK3Error
from ..loading import load
from .kernels_check import read_bandwidth

#: Ids at the end of the vocabulary that are control tokens, and in no prompt here.
CONTROL_IDS = 256


@dataclass(frozen=True)
class Run:
    """One generation: tokens a second of its two phases, and its peak memory (bytes)."""

    prefill: float
    decode: float
    peak_memory: int


@dataclass(frozen=True)
class BenchReport:
    """Medians over ``runs``; rates are tokens a second, sizes bytes.

    Attributes:
        bytes_per_token: weights that one decoded token reads, if routing is even.
        read_bandwidth: bytes a second of a plain read on this machine.
        share_of_bandwidth: rate of weight reads while decoding, of ``read_bandwidth``.
    """

    model: str
    device: str
    prompt_tokens: int
    decoded_tokens: int
    runs: tuple[Run, ...]
    prefill: float
    decode: float
    peak_memory: int
    bytes_per_token: int
    read_bandwidth: float
    share_of_bandwidth: float

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return asdict(self)

    def text(self) -> str:
        """The report for a reader."""
        memory, read = self.peak_memory / 1e9, self.bytes_per_token / 1e9
        return "\n".join(
            [
                f"{self.model} on {self.device}, median of {len(self.runs)} runs",
                f"  prefill      {self.prefill:10.2f} tokens/s  "
                f"({self.prompt_tokens} tokens)",
                f"  decode       {self.decode:10.2f} tokens/s  "
                f"({self.decoded_tokens} tokens)",
                f"  peak memory  {memory:10.3f} GB",
                f"  per token    {read:10.3f} GB of weights",
                f"  plain read   {self.read_bandwidth / 1e9:10.1f} GB/s; decoding "
                f"reaches {self.share_of_bandwidth:.0%} of it",
            ]
        )


def bench(
    model_path: str | Path,
    *,
    prompt_tokens: int = 512,
    decoded_tokens: int = 128,
    runs: int = 3,
    progress: Callable[[str], None] = lambda line: None,
) -> BenchReport:
    """Load a model and time it; one short generation goes before, uncounted.

    Raises KimiK3Error for sizes that give nothing to time, and what
    :func:`kimi_k3.load` raises.
    """
    for name, value, least in (
        ("--prompt", prompt_tokens, 1),
        ("--tokens", decoded_tokens, 2),
        ("--runs", runs, 1),
    ):
        if value < least:
            raise KimiK3Error(f"{name} is {value}; give {least} or more.")
    progress("loading")
    model, tokenizer = load(model_path)
    # An answer that ends early would leave less to time.
    tokenizer.eos_token_ids = None
    progress("warming up")
    generate_once(model, tokenizer, prompt_tokens, 2)
    timed = []
    for number in range(1, runs + 1):
        timed.append(generate_once(model, tokenizer, prompt_tokens, decoded_tokens))
        progress(f"run {number} of {runs}: {timed[-1].decode:.2f} tokens/s")
    needed = bytes_per_token(model)
    progress("reading memory")
    bandwidth = read_bandwidth()
    decode = statistics.median(run.decode for run in timed)
    return BenchReport(
        model=str(model_path),
        device=str(mx.device_info().get("device_name", "unknown")),
        prompt_tokens=prompt_tokens,
        decoded_tokens=decoded_tokens,
        runs=tuple(timed),
        prefill=statistics.median(run.prefill for run in timed),
        decode=decode,
        peak_memory=max(run.peak_memory for run in timed),
        bytes_per_token=needed,
        read_bandwidth=bandwidth,
        share_of_bandwidth=needed * decode / bandwidth,
    )


def generate_once(
    model: Any, tokenizer: Any, prompt_tokens: int, decoded_tokens: int
) -> Run:
    """Time one generation of ``mlx_lm.stream_generate`` on a random prompt."""
    from mlx_lm import stream_generate

    words = model.args.text_config.vocab_size - CONTROL_IDS
    key = mx.random.key(0)
    prompt = mx.random.randint(0, words, (prompt_tokens,), key=key).tolist()
    mx.reset_peak_memory()
    arrivals: list[float] = []
    prefill = 0.0
    for response in stream_generate(
        model,
        tokenizer,
        prompt,  # pyright: ignore[reportArgumentType]
        max_tokens=decoded_tokens,
    ):
        arrivals.append(time.perf_counter())
        prefill = response.prompt_tps
    if len(arrivals) < decoded_tokens:
        raise KimiK3Error(f"mlx-lm gave {len(arrivals)} of {decoded_tokens} tokens.")
    return Run(
        prefill=prefill,
        decode=(len(arrivals) - 1) / (arrivals[-1] - arrivals[0]),
        peak_memory=mx.get_peak_memory(),
    )


def bytes_per_token(model: Any) -> int:
    """Bytes of weights that one decoded token reads, each once.

    All but: the embedding, of which it reads a row unless the head is tied to it; and
    routed experts, of which it reads the chosen. Where a layer's experts differ in
    size, each is as likely as another.
    """
    text = model.args.text_config
    total = 0.0
    flat: Any = tree_flatten(model.parameters())
    for name, array in flat:
        share = 1.0
        if ".switch_mlp." in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            share = text.num_experts_per_token / text.experts_in_layer(layer)
        elif ".embed_tokens." in name and not text.tie_word_embeddings:
            share = 1 / text.vocab_size
        total += share * array.nbytes
    return round(total)
