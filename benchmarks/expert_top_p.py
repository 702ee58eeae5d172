"""What ``expert_top_p`` saves and what it changes, on a small random K3.

    python benchmarks/expert_top_p.py --out benchmarks/results/expert_top_p.json

For each share p: experts run of a token's eight, over all MoE layers, and the
Kullback-Leibler divergence of the next-token distribution from that of the model with
all eight, in nats, over :data:`TOKENS` random tokens. Sigmoid scores of the best experts
are all near 1; a large selection bias makes those of the chosen differ, as the option
needs. Random experts have nothing in common, so their part is turned down. This shows
that the option works and how the two figures go together, not what it does to Kimi K3.
The last line of
the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import json
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from kimi_k3.nano.config import small_config
from kimi_k3.nano.random_checkpoint import write_random_checkpoint

SHAPE: dict[str, Any] = {
    "text": {
        "vocab_size": 1024,
        "hidden_size": 128,
        "num_hidden_layers": 8,
        "intermediate_size": 256,
        "attn_res_block_size": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 64,
        "num_experts_per_token": 8,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
    },
    "linear": {
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "full_attn_layers": [4, 8],
        "num_heads": 4,
        "head_dim": 32,
    },
}
TOKENS = 512
SHARES = (1.0, 0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3)

#: Standard deviation of router logits, about, and of the next token's logits.
ROUTER_SPREAD, LOGIT_SPREAD = 2.0, 2.0

#: On the random selection bias, and on the sum of a layer's routed experts.
BIAS_FACTOR, EXPERT_GAIN = 8.0, 0.1


def make_model(folder: Path) -> Any:
    write_random_checkpoint(folder, small_config(**SHAPE), seed=0)
    model: Any = load_model(folder)[0]
    model.set_dtype(mx.float32)
    return model


def moe_layers(model: Any) -> list[Any]:
    return [layer.mlp for layer in model.layers if "switch_mlp" in layer.mlp]


class Counter:
    """Stands before a layer's experts and counts the slots that have weight."""

    def __init__(self, experts: Any):
        self.experts, self.used = experts, 0

    def combine(self, x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        self.used += int((weights != 0).sum().item())  # pyright: ignore
        return self.experts.combine(x, ids, weights)


def run(model: Any, tokens: mx.array, share: float | None) -> tuple[mx.array, float]:
    """Logits (T, V) and experts run a token and layer."""
    counters, layers = [], moe_layers(model)
    for moe in layers:
        moe.args = replace(moe.args, expert_top_p=share)
        moe.switch_mlp.skips = share is not None
        counters.append(Counter(moe.switch_mlp))
        moe.switch_mlp = counters[-1]
    logits = model(tokens)[0].astype(mx.float32)
    mx.eval(logits)
    for moe, counter in zip(layers, counters, strict=True):
        moe.switch_mlp = counter.experts
    used = sum(counter.used for counter in counters)
    return logits, used / len(counters) / tokens.size


def divergence(logits: mx.array, wanted: mx.array, scale: mx.array) -> float:
    """Mean KL from ``wanted`` to ``logits``, nats a token."""
    first, second = (scaled_log(x * scale) for x in (wanted, logits))
    return (mx.exp(first) * (first - second)).sum(axis=-1).mean().item()  # pyright: ignore


def scaled_log(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def measure() -> list[dict[str, float]]:
    tokens = mx.random.randint(0, 768, (1, TOKENS), key=mx.random.key(0))
    with TemporaryDirectory() as folder:
        model = make_model(Path(folder))
        for moe in moe_layers(model):
            moe.gate.weight = moe.gate.weight * ROUTER_SPREAD
            moe.e_score_correction_bias = moe.e_score_correction_bias * BIAS_FACTOR
            moe.routed_expert_norm.weight = moe.routed_expert_norm.weight * EXPERT_GAIN
        wanted, _ = run(model, tokens, None)
        scale, rows = LOGIT_SPREAD / mx.std(wanted), []
        for share in SHARES:
            logits, used = run(model, tokens, share)
            kl = divergence(logits, wanted, scale)
            rows.append({"p": share, "experts": round(used, 3), "kl": round(kl, 6)})
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    document = {
        "benchmark": "expert_top_p",
        "command": "python benchmarks/expert_top_p.py",
        "shape": SHAPE,
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "tokens": TOKENS,
        "experts_per_token": SHAPE["text"]["num_experts_per_token"],
        "weights": "random",
        "rows": measure(),
    }
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
