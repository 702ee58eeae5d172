"""Memory and time of a long prompt's attention, ours against mlx-lm's own class.

    python benchmarks/long_prompt.py --out benchmarks/results/long_prompt.json

Times the MLA layer of both classes with the same random float32 weights, at reduced
width (:data:`SHAPE`), on the last chunk of prompts of 2k to 64k tokens; what came before
lies in the cache. The two take turns, and a ratio is the median of the ratios within a
turn. Memory is what MLX had allocated at the most beyond weights, cache and inputs.
Outputs are compared before anything is timed. The last line of the output is one JSON
document; ``--out FILE`` also writes it. It takes about 12 GB of memory and some minutes
on a machine that does nothing else.
"""

import argparse
import json
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from kimi_k3.models import ModelArgs
from kimi_k3.models.mla import GatedMLA
from kimi_k3.nano.config import small_config
from kimi_k3.registration import load_upstream

OURS, THEIRS = "kimi-k3-mlx", "mlx-lm"

#: The layer that is measured: 8 heads of 96, a quarter of every other width.
SHAPE = small_config(
    text={
        "vocab_size": 512,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
    linear={},
)

#: Tokens of a prompt that are read at a time: mlx-lm's default.
CHUNK = 2048

CONTEXTS = tuple(2**power for power in range(11, 17))

#: The largest difference of outputs, relative to the largest, that may be timed.
LIMIT = 1e-5

#: At the longest context: least ratio of mlx-lm's memory to ours, most of our time.
GOALS = {"memory ratio": 8.0, "time ratio": 1 / 1.1}


def make_layers() -> dict[str, Any]:
    """Both classes' MLA layer, with the same weights."""
    mx.random.seed(0)
    host = load_upstream("mlx_lm.models.kimi_k3")
    ours = GatedMLA(ModelArgs.from_dict(SHAPE).text_config)
    theirs = host.KimiK3MLAAttention(host.TextArgs.from_dict(SHAPE["text_config"]))
    theirs.load_weights(tree_flatten(ours.parameters()))
    mx.eval(ours.parameters(), theirs.parameters())
    return {OURS: ours, THEIRS: theirs}


class Chunk:
    """The last tokens of a prompt, and a cache of those before."""

    def __init__(self, context: int, tokens: int):
        text = SHAPE["text_config"]
        before = context - tokens
        self.x = mx.random.normal((1, tokens, text["hidden_size"]))
        self.latent = mx.random.normal((1, 1, before, text["kv_lora_rank"]))
        self.shared = mx.random.normal((1, 1, before, text["qk_rope_head_dim"]))
        mx.eval(self.x, self.latent, self.shared)

    def read(self, layer: Any) -> tuple[mx.array, float, int]:
        """Output, seconds, and bytes allocated at the most beside what was there."""
        cache = KVCache()
        if self.latent.size:
            mx.eval(cache.update_and_fetch(self.latent, self.shared))
        mask = create_attention_mask(self.x, cache, return_array=True)
        mx.eval(mask)
        mx.clear_cache()
        mx.reset_peak_memory()
        there, start = mx.get_active_memory(), time.perf_counter()
        out = layer(self.x, mask, cache)
        mx.eval(out)
        return out, time.perf_counter() - start, mx.get_peak_memory() - there


def difference(got: mx.array, want: mx.array) -> float:
    """max|got - want| / max|want|."""
    return float(f"{(mx.abs(got - want).max() / mx.abs(want).max()).item():.1e}")


def measure_context(
    layers: dict[str, Any], context: int, tokens: int, runs: int
) -> dict[str, Any]:
    """Medians of both layers at one length, and their ratios, mlx-lm's over ours."""
    chunk = Chunk(context, min(tokens, context))
    first = {name: chunk.read(layer)[0] for name, layer in layers.items()}
    error = difference(first[OURS], first[THEIRS])
    del first
    if not error <= LIMIT:
        raise RuntimeError(f"outputs at {context} tokens differ by {error}")
    turns: list[dict[str, float]] = []
    peaks: dict[str, int] = dict.fromkeys(layers, 0)
    for run in range(runs):
        turn = {}
        for name in list(layers) if run % 2 else list(layers)[::-1]:
            _, turn[name], peak = chunk.read(layers[name])
            peaks[name] = max(peaks[name], peak)
        turns.append(turn)
    found: dict[str, Any] = {"error": error}
    for name in layers:
        seconds = statistics.median(turn[name] for turn in turns)
        found |= {f"{name} s": round(seconds, 3), f"{name} MB": peaks[name] // 10**6}
    ratios = [turn[THEIRS] / turn[OURS] for turn in turns]
    found["time ratio"] = round(statistics.median(ratios), 2)
    found["memory ratio"] = round(peaks[THEIRS] / peaks[OURS], 1)
    return found


def measure(contexts: tuple[int, ...], tokens: int, runs: int) -> dict[str, Any]:
    layers = make_layers()
    measure_context(layers, min(contexts), tokens, 1)  # warms up
    rows: dict[str, Any] = {}
    for context in contexts:
        rows[str(context)] = measure_context(layers, context, tokens, runs)
        print(context, rows[str(context)], flush=True)
    longest = rows[str(max(contexts))]
    return {
        "benchmark": "long_prompt",
        "command": "python benchmarks/long_prompt.py",
        "machine": f"{platform.system()} {platform.machine()}, CPU, {os.cpu_count()} cores",
        "load average at the end": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "runs": runs,
        "chunk": tokens,
        "attention_block_bytes": layers[OURS].block_bytes,
        "rows": rows,
        "goals": {name: round(goal, 2) for name, goal in GOALS.items()},
        "met": {name: longest[name] >= goal for name, goal in GOALS.items()},
    }


def table(result: dict[str, Any]) -> str:
    """The rows of a result."""
    lines = [
        "| context | mlx-lm MB | kimi-k3-mlx MB | ratio | mlx-lm s | kimi-k3-mlx s "
        "| ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for context, row in result["rows"].items():
        lines.append(
            f"| {int(context):,} | {row[f'{THEIRS} MB']:,} | {row[f'{OURS} MB']:,} "
            f"| {row['memory ratio']} | {row[f'{THEIRS} s']:.2f} "
            f"| {row[f'{OURS} s']:.2f} | {row['time ratio']} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=3, help="runs of each class")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of the chunk")
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=list(CONTEXTS),
        help="tokens in the cache with the chunk",
    )
    parser.add_argument("--out", type=Path, help="write the result here")
    options = parser.parse_args()
    result = measure(tuple(options.contexts), options.chunk, options.runs)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
