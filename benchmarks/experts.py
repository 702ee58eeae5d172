"""Time the routed experts of one layer on the CPU: what choosing a bank costs.

    python benchmarks/experts.py --out benchmarks/results/experts.json

Three questions, each at 1, 8, 64 and 512 tokens, :data:`SHAPE` being a fourth of Kimi
K3's widths:

- ``choosing_a_bank``: two banks, mxfp4 and 2-bit, against the very same routed pairs,
  cut by bank beforehand, run through one single-bank layer of each width;
- ``second_bank``: two mxfp4 banks against one with the same weights;
- ``mlx_lm``: mlx-lm's ``SwitchGLU`` with bfloat16 activations, as mlx-lm runs the
  model, against ours, on the same mxfp4 weights.

Runs of the two sides alternate, and the two of a round make one ratio; a figure is the
median over rounds. Times are worth something beside each other only. ``cpu_ratio`` is
the same of processor time, which other work on the machine changes less. The last line
of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import SwitchGLU

from kimi_k3.config import TextArgs
from kimi_k3.models.expert_banks import ExpertBank, RoutedExperts, TwoBankSwitchGLU
from kimi_k3.nano.config import small_config
from kimi_k3.registration import load_upstream

EXPERTS, SPLIT, TOP_K = 82, 30, 16
WIDTH, INNER = 896, 768

#: A fourth of Kimi K3's latent and inner width, and of the experts and the high bank of
#: the graded build of 326; 16 experts a token, as in K3.
SHAPE: dict[str, Any] = {
    "routed_expert_hidden_size": WIDTH,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_token": TOP_K,
}
HIGH = {"mode": "mxfp4", "bits": 4, "group_size": 32}
LOW = {"mode": "affine", "bits": 2, "group_size": 64}

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

#: Tokens of a call, and the rounds that are timed.
ROUNDS = {1: 101, 8: 25, 64: 5, 512: 3}

#: Largest ratio of the first two questions; least ratio of the third, at 1 token.
GOALS = {"choosing_a_bank": 1.05, "second_bank": 1.05, "mlx_lm": 5.0}

Call = Callable[[], Any]


def text_args() -> TextArgs:
    config: dict[str, Any] = small_config(text=SHAPE | {"vocab_size": 576}, linear={})
    return TextArgs.from_dict(config["text_config"])


def quantize(bank: ExpertBank, width: dict[str, Any]) -> ExpertBank:
    for name in PROJECTIONS:
        bank[name] = bank[name].to_quantized(**width)
    return bank


def two_banks(low: dict[str, Any]) -> TwoBankSwitchGLU:
    mx.random.seed(0)
    experts = TwoBankSwitchGLU(text_args(), EXPERTS, SPLIT)
    quantize(experts.bank_hi, HIGH)
    quantize(experts.bank_lo, low)
    experts.eval()
    mx.eval(experts.parameters())
    return experts


def one_bank() -> ExpertBank:
    mx.random.seed(0)
    bank = quantize(ExpertBank(text_args(), EXPERTS), HIGH)
    bank.eval()
    mx.eval(bank.parameters())
    return bank


def cut_in_two(bank: ExpertBank) -> TwoBankSwitchGLU:
    """Two banks that are the two parts of ``bank``, in the same memory."""
    experts = two_banks(HIGH)
    for name in PROJECTIONS:
        for part in ("weight", "scales"):
            experts.bank_hi[name][part] = bank[name][part][:SPLIT]
            experts.bank_lo[name][part] = bank[name][part][SPLIT:]
    mx.eval(experts.parameters())
    return experts


def upstream(bank: ExpertBank) -> SwitchGLU:
    """mlx-lm's own layer and activation, on the same mxfp4 experts."""
    args = text_args()
    host = load_upstream("mlx_lm.models.kimi_k3")
    betas = args.activation_situ_beta, args.activation_situ_linear_beta
    layer: Any = SwitchGLU(WIDTH, INNER, EXPERTS, activation=host.SiTU(*betas))
    for name in PROJECTIONS:
        layer[name] = bank[name]
    return layer


def routed(tokens: int) -> tuple[mx.array, mx.array, mx.array]:
    """bfloat16 activations, distinct experts a token, and weights of sum 1."""
    keys = mx.random.split(mx.random.key(tokens), 3)
    x = mx.random.normal((1, tokens, WIDTH), key=keys[0]).astype(mx.bfloat16)
    scores = mx.random.uniform(shape=(1, tokens, EXPERTS), key=keys[1])
    ids = mx.argsort(scores, axis=-1)[..., :TOP_K].astype(mx.uint32)
    weights = mx.random.uniform(shape=ids.shape, key=keys[2])
    weights = weights / weights.sum(axis=-1, keepdims=True)
    mx.eval(x, ids, weights)
    return x, ids, weights


def bank_by_bank(
    experts: TwoBankSwitchGLU, x: mx.array, ids: mx.array, weights: mx.array
) -> Call:
    """The routed pairs as two calls of single-bank layers, cut while nobody counts."""
    flat, calls = ids.flatten().tolist(), []
    for bank, first, last in (
        (experts.bank_hi, 0, SPLIT),
        (experts.bank_lo, SPLIT, EXPERTS),
    ):
        own = [i for i, e in enumerate(flat) if first <= e < last]  # pyright: ignore
        if not own:
            continue
        place = mx.array(own)
        pairs = (
            x.reshape(-1, WIDTH)[place // TOP_K],
            ids.flatten()[place][:, None] - first,
            weights.flatten()[place][:, None],
        )
        mx.eval(pairs)
        calls.append((bank, pairs))
    return lambda: [bank.combine(*pairs) for bank, pairs in calls]


def combined(experts: RoutedExperts, given: tuple[mx.array, ...]) -> Call:
    x, ids, weights = given
    return lambda: experts.combine(x, ids, weights)


def seconds(call: Call) -> tuple[float, float]:
    """Of one call: on the clock, and of all cores together."""
    start = time.perf_counter(), time.process_time()
    mx.eval(call())
    return time.perf_counter() - start[0], time.process_time() - start[1]


def compare(first: Call, second: Call, rounds: int) -> dict[str, float]:
    """Milliseconds of both and the ratio first : second, medians over rounds."""
    if rounds > 3:
        mx.eval(first(), second())
    ones, others = [], []
    for i in range(rounds):
        if i % 2:
            ones.append(seconds(first))
        others.append(seconds(second))
        if not i % 2:
            ones.append(seconds(first))
    pairs = list(zip(ones, others, strict=True))
    return {
        "ms": round(statistics.median(wall for wall, _ in ones) * 1e3, 3),
        "other_ms": round(statistics.median(wall for wall, _ in others) * 1e3, 3),
        "ratio": round(statistics.median(a[0] / b[0] for a, b in pairs), 3),
        "cpu_ratio": round(statistics.median(a[1] / b[1] for a, b in pairs), 3),
    }


def check(ours: mx.array, others: mx.array, limit: float) -> None:
    """Raise unless both sides computed the same."""
    ours, others = ours.astype(mx.float32), others.astype(mx.float32)
    error = (mx.abs(ours - others).max() / mx.abs(ours).max()).item()
    if not error < limit:  # pyright: ignore[reportOperatorIssue]
        raise RuntimeError(f"the two sides differ by {error}; nothing is timed")


def measure(most_tokens: int) -> dict[str, Any]:
    graded, single = two_banks(LOW), one_bank()
    twice, host = cut_in_two(single), upstream(single)
    results: dict[str, Any] = {name: {} for name in GOALS}
    for tokens, rounds in ROUNDS.items():
        if tokens > most_tokens:
            continue
        given = x, ids, weights = routed(tokens)

        def theirs(x: Any = x, ids: Any = ids, weights: Any = weights) -> mx.array:
            return (host(x, ids) * weights[..., None]).sum(axis=-2)

        ours = single.combine(x, ids, weights)
        check(ours, twice.combine(x, ids, weights), 1e-6)
        check(ours, theirs(), 0.1)
        sides = {
            "choosing_a_bank": (combined(graded, given), bank_by_bank(graded, *given)),
            "second_bank": (combined(twice, given), combined(single, given)),
            "mlx_lm": (theirs, combined(single, given)),
        }
        for name, (first, second) in sides.items():
            # mlx-lm's side takes minutes for many tokens.
            some = rounds if name != "mlx_lm" else max(1, rounds // 4)
            results[name][tokens] = compare(first, second, some)
            print(f"{tokens:4} tokens  {name:16} {results[name][tokens]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--most-tokens", type=int, default=max(ROUNDS))
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    load_before = os.getloadavg()[0]
    results = measure(options.most_tokens)
    document = {
        "benchmark": "experts",
        "shape": SHAPE | {"split": SPLIT, "high": HIGH, "low": LOW},
        "machine": f"{platform.machine()} {platform.system()}, {os.cpu_count()} cores, CPU",
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "versions": {name: version(name) for name in ("mlx", "mlx-lm")},
        "rounds": ROUNDS,
        "goals": GOALS,
        "results": results,
    }
    line = json.dumps(document)
    if options.out:
        options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(line)


if __name__ == "__main__":
    main()
