"""Decode thousands of tokens through mlx-lm's BatchGenerator and watch memory.

    python benchmarks/soak.py                       # ours, 3000 tokens
    python benchmarks/soak.py --upstream            # mlx-lm's own class, same weights

A tiny random model of eleven layers (nine KDA) runs on this machine; nothing is timed.
MLX keeps no spare buffers during the run, so resident memory is what is in use; it and
the depth of the caches' pending graphs are read every 500 tokens.
The last line of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import io
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tiny_k3 import t0_config, t0_model

DEEP: dict[str, Any] = {
    "num_hidden_layers": 11,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
        "full_attn_layers": [4, 8],
    },
}


def upstream_twin(model: Any) -> Any:
    """mlx-lm's own class with the weights of ``model``."""
    from kimi_k3.registration import load_upstream

    host = load_upstream("mlx_lm.models.kimi_k3")
    twin = host.Model(host.ModelArgs.from_dict(t0_config(**DEEP)))
    twin.load_weights(tree_flatten(model.parameters()))
    twin.eval()
    return twin


def resident_mb() -> float:
    """Resident memory of this process now, in MB (Linux; elsewhere the peak)."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(x for x in status.read_text().splitlines() if x.startswith("VmRSS"))
        return int(line.split()[1]) / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def pending_edges(caches: list[Any]) -> int:
    """Edges of the deepest unevaluated graph behind a cache's padding or offset."""
    deepest = 0
    for cache in caches:
        for name in ("left_padding", "lengths", "offset"):
            value = getattr(cache, name, None)
            if isinstance(value, mx.array):
                dot = io.StringIO()
                mx.export_to_dot(dot, value)
                deepest = max(deepest, dot.getvalue().count("->"))
    return deepest


def soak(model: Any, rows: int, tokens: int) -> list[dict[str, float]]:
    """Readings every 500 tokens of one greedy generation of ``rows`` rows."""
    generator = BatchGenerator(model, max_tokens=tokens + 2)
    generator.insert([[1 + row, 2, 3] for row in range(rows)])
    readings, done = [], 0
    while done < tokens:
        done += bool(generator.next_generated())
        if done % 500 == 0 and (not readings or readings[-1]["tokens"] != done):
            caches = generator._generation_batch.prompt_cache
            reading = {
                "tokens": done,
                "resident_mb": round(resident_mb(), 1),
                "active_mb": round(mx.get_active_memory() / 2**20, 2),
                "pending_edges": pending_edges(caches),
            }
            readings.append(reading)
            print(f"{rows} row(s): {reading}")
    return readings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3000, help="tokens a row")
    parser.add_argument("--upstream", action="store_true", help="mlx-lm's own class")
    parser.add_argument("--out", type=Path, help="also write the result here")
    options = parser.parse_args()
    mx.set_cache_limit(0)
    model = t0_model(**DEEP)
    if options.upstream:
        model = upstream_twin(model)
    result = {
        "benchmark": "soak",
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "machine": f"{platform.system()} {platform.machine()}, {mx.default_device()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "runs": {str(rows): soak(model, rows, options.tokens) for rows in (1, 2)},
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
