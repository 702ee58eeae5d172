"""Count launches and weight bytes of one decoded token, at Kimi K3's real size.

    python benchmarks/launch_census.py --out benchmarks/results/launch_census.json

Nothing runs: the 2.78-trillion-parameter model is built lazily, both classes take their
GPU paths (:mod:`census.pretend_gpu`), and the graphs of one decode step and of one
prefill chunk are counted by the rules in :mod:`census.lazy_graph`. Rows: mlx-lm's own
class and ours on a uniform build (experts mxfp4, the rest as each class stores it), and
ours on a two-bank build (326 of 896 experts, 121 mxfp4 and 205 affine 2-bit). The last
line of the output is one JSON document; ``--out FILE`` also writes it.
"""

import argparse
import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "census"))

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from lazy_graph import Graph, Weight, leaf, weight_bytes
from mlx.utils import tree_flatten, tree_unflatten
from parts import Cutter, cache_arrays, split_graph
from pretend_gpu import KernelCalls, pretend_gpu

#: Experts kept a layer, and how many of them lie in the high bank, in the two-bank row.
KEPT, HIGH = 326, 121

MXFP4 = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
AFFINE2 = {"group_size": 64, "bits": 2, "mode": "affine"}

#: Tokens already in the cache: decode starts inside one of the cache's steps of 256.
DECODE_OFFSET, CHUNK = 1000, 2048

Targets = list[tuple[Any, str, str]]


class Subject:
    """One model class on one build, its parameters replaced by arrays without memory."""

    def __init__(
        self,
        model: Any,
        targets: Callable[[Any], Targets],
        calls: KernelCalls,
        experts: int,
        split: int,
    ):
        self.model, self.calls = model, calls
        self.text = model.language_model.args
        self.experts, self.split = experts, split
        self.pairs = self.text.num_experts_per_token
        self.chosen = self.expert_ids((1, self.pairs))
        self.quantize()
        model.eval()
        self.weights: dict[str, Weight] = {}
        self.names: dict[str, mx.array] = {}
        self.replace_parameters()
        self.targets = targets(model)
        caches = model.make_cache()
        self.step(1, caches)
        self.cache_shapes = [
            [(a.shape, a.dtype) for a in cache_arrays(c)] for c in caches
        ]
        self.replace_held_arrays()

    def quantize(self) -> None:
        """Experts in the widths of the build, lazily."""

        def width(path: str, module: Any) -> Any:
            if ".switch_mlp." not in path or not hasattr(module, "to_quantized"):
                return False
            return AFFINE2 if ".bank_lo." in path else MXFP4

        nn.quantize(self.model, class_predicate=width)

    def replace_parameters(self) -> None:
        cast = self.model.cast_predicate
        flat: Any = tree_flatten(self.model.parameters())
        replaced = []
        for name, array in flat:
            floating = mx.issubdtype(array.dtype, mx.floating)
            dtype = mx.bfloat16 if floating and cast(name) else array.dtype
            replaced.append((name, self.add(name, array.shape, dtype)))
        self.model.update(tree_unflatten(replaced))

    def add(self, name: str, shape: Any, dtype: Any) -> mx.array:
        """A leaf that is known as the weight ``name``."""
        array = leaf(shape, dtype)
        key = f"weight{len(self.names):05d}"
        self.names[key] = array
        if ".switch_mlp." in name:
            high = int((self.chosen < self.split).sum().item())
            wanted = self.pairs - high if ".bank_lo." in name else high
            wanted = wanted if self.split else self.pairs
            self.weights[key] = Weight(array.nbytes, shape[0], self.pairs, wanted)
        elif "embed_tokens" in name:
            self.weights[key] = Weight(array.nbytes, shape[0])
        else:
            self.weights[key] = Weight(array.nbytes)
        return array

    def replace_held_arrays(self) -> None:
        """What modules computed once and keep is ready before the next token."""
        known = {id(array) for array in self.names.values()}
        for path, module in self.model.named_modules():
            for name, held in module.items():
                if isinstance(held, mx.array) and id(held) not in known:
                    module[name] = self.add(f"{path}.{name}", held.shape, held.dtype)

    def expert_ids(self, shape: Any) -> mx.array:
        """Routed ids: different experts for each token, drawn evenly."""
        rng = np.random.default_rng(0)
        rows = [
            rng.choice(self.experts, shape[-1], replace=False)
            for _ in range(int(np.prod(shape[:-1])))
        ]
        return mx.array(np.array(rows, np.uint32).reshape(shape))

    def caches_at(self, offset: int) -> list[Any]:
        """Caches that hold ``offset`` tokens, none of them computed."""
        caches = self.model.make_cache()
        for cache, arrays in zip(caches, self.cache_shapes, strict=True):
            if hasattr(cache, "cache"):
                cache.cache = [leaf(shape, dtype) for shape, dtype in arrays]
                continue
            room = -(-offset // cache.step) * cache.step
            cache.keys, cache.values = (
                leaf((*shape[:2], room, shape[3]), dtype) for shape, dtype in arrays
            )
            cache.offset = offset
        return caches

    def step(self, tokens: int, caches: list[Any]) -> list[mx.array]:
        """The outputs of one call: logits and what the caches hold then."""
        self.calls.clear()
        logits = self.model(leaf((1, tokens), mx.int32), caches)
        return [logits, *(array for cache in caches for array in cache_arrays(cache))]

    def graphs(self, cutter: Cutter) -> dict[str, tuple[Graph, int]]:
        """By part what the cutter saw, and the weight bytes that it reads."""
        kernels = {f"kernel{i:05d}": pair for i, pair in enumerate(self.calls.outputs)}
        arrays = {key: array for key, (array, _) in kernels.items()}
        parts = split_graph(cutter, self.names | arrays)
        names = {key: name for key, (_, name) in kernels.items()}
        return {
            part: (graph, weight_bytes(graph, self.weights, names))
            for part, graph in parts.items()
        }

    def count(self, tokens: int, offset: int) -> dict[str, Any]:
        """Launches of one call by part, and for one token weight bytes too."""
        cutter = Cutter({id(a) for a in self.names.values()}, self.expert_ids)
        with cutter.wrapped(self.targets):
            outputs = self.step(tokens, self.caches_at(offset))
        cutter.roots.append((outputs[0], "rest"))
        kernels = self.calls.names()
        parts = self.graphs(cutter)
        row = {
            "launches": sum(graph.launches() for graph, _ in parts.values()),
            "nodes with views": sum(graph.nodes() for graph, _ in parts.values()),
            "launches by part": {n: g.launches() for n, (g, _) in parts.items()},
            "kernels": kernels,
            "primitives by part": {n: primitives(g) for n, (g, _) in parts.items()},
        }
        if tokens == 1:
            self.check_whole(row, offset)
            row["weight bytes"] = sum(size for _, size in parts.values())
            row["weight bytes by part"] = {n: size for n, (_, size) in parts.items()}
            row["weight bytes of what is routed to"] = self.expected_bytes()
        return row

    def check_whole(self, row: dict[str, Any], offset: int) -> None:
        """Raise unless the parts add up to what an uncut step launches."""
        uncut = Cutter(set(), self.expert_ids)
        outputs = self.step(1, self.caches_at(offset))
        uncut.roots = [(array, "whole") for array in outputs]
        whole, _ = self.graphs(uncut)["whole"]
        if whole.launches() != row["launches"]:
            raise RuntimeError(
                f"parts make {row['launches']} launches, the step {whole.launches()}"
            )

    def expected_bytes(self) -> int:
        """Every parameter once; of experts the chosen, of the embedding one row.

        The first layer's attention mix has nothing to mix, so nobody reads its weights.
        """
        flat: Any = tree_flatten(self.model.parameters())
        key_of = {id(array): key for key, array in self.names.items()}
        weights = {name: self.weights[key_of[id(array)]] for name, array in flat}
        return sum(
            weight.bytes_of(weight.wanted)
            for name, weight in weights.items()
            if "layers.0.self_attention_res" not in name
        )


def primitives(graph: Graph) -> dict[str, int]:
    """Launches by primitive, fused ones under one name, kernels among ``Depends``."""
    counts: dict[str, int] = {}
    for name, count in graph.primitives().items():
        name = "Compiled" if name.startswith("Compiled") else name
        counts[name] = counts.get(name, 0) + count
    return counts


def as_own_class(module: Any) -> Any:
    """Give ``module`` a class of its own, so that its calls alone can be wrapped."""
    module.__class__ = type(type(module).__name__, (type(module),), {})
    return type(module)


def our_targets(model: Any) -> Targets:
    from kimi_k3.models import attention_residuals, kda, latent_moe, mla, mlp, text

    return [
        (kda.KimiDeltaAttention, "__call__", "KDA"),
        (mla.GatedMLA, "__call__", "MLA"),
        (text, "mix", "AttnRes"),
        (text, "mix_and_norm", "AttnRes"),
        (attention_residuals.ResidualStack, "push", "AttnRes"),
        (latent_moe.LatentMoE, "route", "router"),
        (latent_moe.LatentMoE, "__call__", "experts"),
        (mlp.MLP, "__call__", "shared"),
        (as_own_class(model.language_model.lm_head), "__call__", "head"),
    ]


def host_targets(model: Any) -> Targets:
    from kimi_k3.registration import load_upstream

    host = load_upstream("mlx_lm.models.kimi_k3")
    gates: Targets = [
        (as_own_class(layer.mlp.gate), "__call__", "router")
        for layer in model.layers
        if hasattr(layer.mlp, "gate")
    ]
    return [
        (host.KimiK3DeltaAttention, "__call__", "KDA"),
        (host.KimiK3MLAAttention, "__call__", "MLA"),
        (host, "_attn_res_mix", "AttnRes"),
        (host.ResidualBlocks, "append", "AttnRes"),
        (host, "_group_expert_select", "router"),
        (host.KimiK3SparseMoE, "__call__", "experts"),
        (host.KimiK3MLP, "__call__", "shared"),
        (as_own_class(model.language_model.lm_head), "__call__", "head"),
        *gates,
    ]


def subjects(config: dict[str, Any], calls: KernelCalls) -> dict[str, Subject]:
    """The rows of the census; imports the classes, so call it inside pretend_gpu."""
    from kimi_k3.models import Model, ModelArgs
    from kimi_k3.registration import load_upstream

    host = load_upstream("mlx_lm.models.kimi_k3")
    experts = config["text_config"]["num_experts"]
    kept, high = min(KEPT, experts), min(HIGH, experts // 2)
    dense = config["text_config"]["first_k_dense_replace"]
    layers = config["text_config"]["num_hidden_layers"]

    def each_layer(count: int) -> list[int]:
        return [0] * dense + [count] * (layers - dense)

    banks = {"expert_counts": each_layer(kept), "expert_bank_split": each_layer(high)}
    graded = config | {"text_config": config["text_config"] | banks}

    def ours(config: dict[str, Any], experts: int, split: int) -> Subject:
        model = Model(ModelArgs.from_dict(config))
        return Subject(model, our_targets, calls, experts, split)

    theirs = host.Model(host.ModelArgs.from_dict(config))
    return {
        "mlx-lm, uniform": Subject(theirs, host_targets, calls, experts, 0),
        "kimi-k3-mlx, uniform": ours(config, experts, 0),
        "kimi-k3-mlx, two banks": ours(graded, kept, high),
    }


def census(config: dict[str, Any]) -> dict[str, Any]:
    """Count every row in one process."""
    with pretend_gpu() as calls:
        rows = {
            name: {
                "decode": subject.count(1, DECODE_OFFSET),
                "prefill": subject.count(CHUNK, CHUNK),
            }
            for name, subject in subjects(config, calls).items()
        }
    base = rows["mlx-lm, uniform"]

    def ratio(name: str, phase: str) -> float:
        return round(rows[name][phase]["launches"] / base[phase]["launches"], 3)

    ours = [name for name in rows if name.startswith("kimi")]
    return {
        "benchmark": "launch_census",
        "command": "python benchmarks/launch_census.py",
        "counted": "nodes of lazy graphs on pretended GPU paths; nothing ran",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "prefill_chunk_tokens": CHUNK,
        "rows": rows,
        "ratios": {n: {p: ratio(n, p) for p in ("decode", "prefill")} for n in ours},
        "bytes_exact": all(
            rows[n]["decode"]["weight bytes"]
            == rows[n]["decode"]["weight bytes of what is routed to"]
            for n in ours
        ),
        "launch_ratio_to_mlx_lm": max(ratio(n, "decode") for n in ours),
    }


def table(result: dict[str, Any], phase: str) -> str:
    """Launches by part, one column a row of the census."""
    rows = {name: row[phase] for name, row in result["rows"].items()}
    parts = sorted({p for row in rows.values() for p in row["launches by part"]})
    lines = [f"| {phase} | " + " | ".join(rows) + " |", "|---" * (len(rows) + 1) + "|"]
    for part in parts:
        counts = [str(row["launches by part"].get(part, 0)) for row in rows.values()]
        lines.append(f"| {part} | " + " | ".join(counts) + " |")
    for total in ("launches", "nodes with views"):
        counts = [str(row[total]) for row in rows.values()]
        lines.append(f"| {total} | " + " | ".join(counts) + " |")
    return "\n".join(lines)


def main() -> None:
    from kimi_k3.checkpoint.source_layout import full_size_config
    from kimi_k3.nano.config import NANO_CONFIG

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nano", action="store_true", help="count a very small K3")
    parser.add_argument("--out", type=Path, help="write the result here")
    options = parser.parse_args()
    result = census(NANO_CONFIG if options.nano else full_size_config())
    for phase in ("decode", "prefill"):
        print(table(result, phase))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
