"""Time prefill and decode of our class against mlx-lm's own, on one build.

    python benchmarks/decode.py --out benchmarks/results/decode.json

Writes a random build with experts in mxfp4 and the rest in bf16 (:data:`SHAPE`), loads
it twice through ``mlx_lm.utils.load_model``, and checks before timing that both classes
give the same logits. The two take turns at every step; figures are medians, of time on
the clock and of processor time ("cpu"), and those of one run can be compared with each
other and with nothing else. The last line of the output is one JSON document;
``--out FILE`` also writes it. Run it on a machine that does nothing else.
"""

import argparse
import json
import math
import os
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from kimi_k3.models import Model, ModelArgs
from kimi_k3.nano.config import small_config
from kimi_k3.registration import is_ours, load_upstream

#: The model that is timed: one K3 in small, three KDA layers to one MLA layer.
SHAPE = small_config(
    text={
        "vocab_size": 8192,
        "hidden_size": 1024,
        "num_hidden_layers": 12,
        "intermediate_size": 4096,
        "attn_res_block_size": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_experts": 64,
        "num_experts_per_token": 8,
        "num_shared_experts": 2,
        "moe_intermediate_size": 512,
        "routed_expert_hidden_size": 512,
    },
    linear={
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11],
        "full_attn_layers": [4, 8, 12],
        "num_heads": 8,
        "head_dim": 128,
    },
)

#: The largest difference of float32 logits, relative to the largest, that may be timed.
FLOAT32_LIMIT = 1e-4

#: What the figures are held against: times of mlx-lm's class over times of ours.
GOALS = {
    "bfloat16": {"prefill": 4.0, "decode": 2.5},
    "float32": {"prefill": 1.0, "decode": 1.0},
}


def write_build(folder: Path) -> None:
    """A random build of :data:`SHAPE`, dtypes as ``mlx_lm.convert`` leaves them."""
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(SHAPE))
    host = load_upstream("mlx_lm.models.kimi_k3")
    cast = host.Model(host.ModelArgs.from_dict(SHAPE)).cast_predicate
    weights: dict[str, mx.array] = {}
    for name, value in tree_flatten(model.parameters()):  # pyright: ignore
        if ".switch_mlp." in name:
            weights |= random_mxfp4(name.removesuffix(".weight"), value.shape)
        else:
            if name.endswith("dt_bias"):
                value = mx.random.normal(value.shape)
            elif name.endswith("e_score_correction_bias"):
                value = 0.05 * mx.random.normal(value.shape)
            elif name.endswith("routed_expert_norm.weight"):
                # Random experts have nothing in common: a bf16 tie would be everything.
                value = 0.1 * value
            weights[name] = value.astype(mx.bfloat16) if cast(name) else value
    mx.save_safetensors(
        str(folder / "model.safetensors"), weights, metadata={"format": "mlx"}
    )
    mode = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    entries = {
        name.removesuffix(".scales"): mode for name in weights if "scales" in name
    }
    quantization = {"quantization": mode | entries}
    (folder / "config.json").write_text(json.dumps(SHAPE | quantization))


def random_mxfp4(name: str, shape: tuple[int, ...]) -> dict[str, mx.array]:
    """Random codes of an (E, out, in) matrix; values of about 1/sqrt(in) in size."""
    codes = mx.random.randint(0, 2**31 - 1, (*shape[:-1], shape[-1] // 8))
    # The mean square of E2M1's values is 8.6, and 2^1.5 is near its root.
    exponent = 127 - round(math.log2(shape[-1]) / 2 + 1.5)
    scales = mx.full((*shape[:-1], shape[-1] // 32), exponent, dtype=mx.uint8)
    return {f"{name}.weight": codes.astype(mx.uint32), f"{name}.scales": scales}


def load_both(folder: Path) -> dict[str, Any]:
    """The build in our class and in mlx-lm's, each checked to come from its own file."""
    host = load_upstream("mlx_lm.models.kimi_k3")
    if is_ours(host.__file__) or not str(host.__file__).endswith(
        "mlx_lm/models/kimi_k3.py"
    ):
        raise RuntimeError(f"mlx-lm's class comes from {host.__file__}")
    classes = {
        "kimi-k3-mlx": (Model, ModelArgs),
        "mlx-lm": (host.Model, host.ModelArgs),
    }
    found = {}
    for name, pair in classes.items():
        model, _ = load_model(folder, get_model_classes=lambda config, pair=pair: pair)
        if type(model) is not pair[0]:
            raise RuntimeError(f"{name}: got {type(model)}")
        found[name] = model
    return found


def logits_of(model: Any, tokens: mx.array, decoded: int) -> mx.array:
    """Float32 logits of a prefill and of ``decoded`` single steps behind it, (T, V)."""
    cache, split = model.make_cache(), tokens.size - decoded
    parts = [model(tokens[None, :split], cache)]
    for i in range(split, tokens.size):
        parts.append(model(tokens[None, i : i + 1], cache))
        mx.eval(parts[-1])
    return mx.concatenate(parts, axis=1)[0].astype(mx.float32)


def error(got: mx.array, want: mx.array) -> float:
    """max|got - want| / max|want|."""
    return float(f"{(mx.abs(got - want).max() / mx.abs(want).max()).item():.2e}")


class Timed:
    """One model in the middle of a generation; each call runs and times a step."""

    def __init__(self, model: Any):
        self.model = model
        self.cache = model.make_cache()

    def __call__(self, tokens: mx.array) -> tuple[mx.array, float, float]:
        """The next token, seconds on the clock, and seconds of processor time."""
        start, used = time.perf_counter(), time.process_time()
        logits = self.model(tokens, self.cache)
        mx.eval(logits, [entry.state for entry in self.cache])
        seconds = time.perf_counter() - start, time.process_time() - used
        return mx.argmax(logits[:, -1:], axis=-1), *seconds


def alternate(
    models: dict[str, Any], tokens: mx.array, runs: int, decoded: int
) -> dict[str, Any]:
    """Milliseconds of each model by phase, medians, and their ratios.

    The models take turns at every step, each beginning as often as the other, and a
    ratio is the median of the ratios within a turn: what else the machine does meets
    both. "cpu" is processor time.
    """
    pairs: dict[str, list[dict[str, float]]] = {}
    for number in range(runs):
        timed = {name: Timed(model) for name, model in models.items()}
        given = dict.fromkeys(models, tokens[None])
        for step in range(decoded + 1):
            phase = "decode" if step else "prefill"
            order = list(models) if (number + step) % 2 else list(models)[::-1]
            turn: dict[str, tuple[float, float]] = {}
            for name in order:
                given[name], *seconds = timed[name](given[name])
                turn[name] = (seconds[0], seconds[1])
            for i, clock in enumerate((phase, f"{phase} cpu")):
                pairs.setdefault(clock, []).append({n: t[i] for n, t in turn.items()})
    return {clock: _summary(turns) for clock, turns in pairs.items()}


def _summary(turns: list[dict[str, float]]) -> dict[str, float]:
    ratios = [turn["mlx-lm"] / turn["kimi-k3-mlx"] for turn in turns]
    found = {
        f"{name} ms": round(statistics.median(turn[name] for turn in turns) * 1e3, 2)
        for name in turns[0]
    }
    return found | {"ratio": round(statistics.median(ratios), 2)}


def agreement(
    models: dict[str, Any], tokens: mx.array, decoded: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Errors of bf16 logits against a float32 run, and between float32 runs.

    Leaves the models in float32. Raises if the float32 logits differ.
    """
    in_bf16 = {k: logits_of(m, tokens, decoded) for k, m in models.items()}
    mx.eval(in_bf16)
    for model in models.values():
        model.set_dtype(mx.float32)
    in_float32 = {k: logits_of(m, tokens, decoded) for k, m in models.items()}
    truth = in_float32["mlx-lm"]
    between = {"float32": error(in_float32["kimi-k3-mlx"], truth)}
    if not between["float32"] <= FLOAT32_LIMIT:
        raise RuntimeError(f"float32 logits differ by {between['float32']}")
    return {k: error(v, truth) for k, v in in_bf16.items()}, between


def measure(runs: int, prompt: int, decoded: int) -> dict[str, Any]:
    mx.random.seed(0)
    tokens = mx.random.randint(0, SHAPE["text_config"]["vocab_size"] - 256, (prompt,))
    with TemporaryDirectory() as folder:
        write_build(Path(folder))
        models = load_both(Path(folder))
        mx.eval([model.parameters() for model in models.values()])
        checked = load_both(Path(folder))
        of_bf16, between = agreement(checked, tokens[: prompt // 2], 4)
        print("bf16 logits against float32:", of_bf16, "float32:", between, flush=True)

    rows = {}
    for dtype, pair in {"bfloat16": models, "float32": checked}.items():
        for model in pair.values():
            logits_of(model, tokens[:8], 2)
        rows[dtype] = alternate(pair, tokens, runs, decoded)
        print(dtype, rows[dtype], flush=True)
    return {
        "benchmark": "decode",
        "command": "python benchmarks/decode.py",
        "machine": f"{platform.system()} {platform.machine()}, CPU, {os.cpu_count()} cores",
        "load average at the end": round(os.getloadavg()[0], 1),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "runs": runs,
        "prompt_tokens": prompt,
        "decoded_tokens": decoded,
        "bf16_logits_against_float32": of_bf16,
        "float32_logits_between_classes": between["float32"],
        "rows": rows,
        "goals": GOALS,
        "met": {
            dtype: {p: rows[dtype][p]["ratio"] >= goal for p, goal in goals.items()}
            for dtype, goals in GOALS.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """The rows of a result, in milliseconds."""
    lines = [
        "| weights | phase | mlx-lm ms | kimi-k3-mlx ms | ratio | ratio of cpu time |",
        "|---|---|---|---|---|---|",
    ]
    for dtype, row in result["rows"].items():
        for phase in ("prefill", "decode"):
            ms, cpu = row[phase], row[f"{phase} cpu"]
            lines.append(
                f"| {dtype} | {phase} | {ms['mlx-lm ms']:.0f} "
                f"| {ms['kimi-k3-mlx ms']:.0f} | {ms['ratio']} | {cpu['ratio']} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each model")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of the prefill")
    parser.add_argument("--tokens", type=int, default=16, help="decoded tokens a run")
    parser.add_argument("--out", type=Path, help="write the result here")
    options = parser.parse_args()
    result = measure(options.runs, options.prompt, options.tokens)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
