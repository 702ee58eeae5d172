"""Float64 truth, part 7: what a calibration records, token by token."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from oracle_model import Oracle
from oracle_moe import route
from oracle_mxfp4 import mxfp4
from oracles import linear, situ

Array = np.ndarray


@dataclass
class Truth:
    """One layer's statistics (corpora, experts), moments by name, and the closest tie.

    ``moments`` of matrices are (corpora, inputs), those of ``experts`` (experts,
    inputs), with the squared weight of the token in both.
    """

    corpora: int
    experts: int
    sums: dict[str, Array] = field(init=False)
    moments: dict[str, Array] = field(default_factory=dict)
    gap: float = np.inf

    def __post_init__(self) -> None:
        names = ("count", "gate_sum", "gate_square_sum", "reap_sum", "relative_sum")
        shape = self.corpora, self.experts
        self.sums = {name: np.zeros(shape) for name in (*names, "contribution_max")}

    def moment(self, name: str, rows: int, row: int, values: Array) -> None:
        found = self.moments.setdefault(name, np.zeros((rows, values.shape[-1])))
        found[row] += values

    def read(self, name: str, x: Array, corpus: Array) -> None:
        """Add what the matrix ``name`` reads, [T, inputs], token by token."""
        for values, label in zip(x, corpus, strict=True):
            if label >= 0:
                self.moment(name, self.corpora, label, values**2)


def record_experts(
    truth: Truth, x: Array, corpus: Array, weights: dict[str, Array], config: dict
) -> None:
    """Add tokens x [T, hidden] of the corpora [T]; a corpus of -1 is padding."""
    bias = weights["gate.e_score_correction_bias"]
    chosen, gates, gap = route(x, weights["gate.weight"], bias, config)
    truth.gap = min(truth.gap, float(gap[corpus >= 0].min(initial=np.inf)))
    latent = x
    if config.get("routed_expert_hidden_size") is not None:
        latent = linear(x, weights["routed_expert_down_proj.weight"])
    caps = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    matrices: dict[tuple[int, str], Array] = {}

    def matrix(expert: int, which: str) -> Array:
        if (expert, which) not in matrices:
            stem = f"experts.{expert}.{which}."
            packed = weights[f"{stem}weight_packed"], weights[f"{stem}weight_scale"]
            matrices[expert, which] = mxfp4(*packed)
        return matrices[expert, which]

    for token, label in enumerate(corpus):
        if label < 0:
            continue
        row, outputs = latent[token], {}
        for expert, gate in zip(chosen[token], gates[token], strict=True):
            up = matrix(expert, "w3") @ row
            hidden = situ(matrix(expert, "w1") @ row, up, *caps)
            outputs[expert] = gate, matrix(expert, "w2") @ hidden
            truth.moment("gate_up", truth.experts, expert, gate**2 * row**2)
            truth.moment("down", truth.experts, expert, gate**2 * hidden**2)
        total = np.linalg.norm(np.sum([g * e for g, e in outputs.values()], axis=0))
        for expert, (gate, output) in outputs.items():
            norm = np.linalg.norm(output)
            sums, place = truth.sums, (label, expert)
            sums["count"][place] += 1
            sums["gate_sum"][place] += gate
            sums["gate_square_sum"][place] += gate**2
            sums["reap_sum"][place] += gate * norm
            sums["relative_sum"][place] += gate * norm / total
            largest = sums["contribution_max"]
            largest[place] = max(largest[place], gate * norm)


def record_model(
    oracle: Oracle, tokens: Array, labels: Array, corpora: int
) -> list[Truth]:
    """A :class:`Truth` for each layer: rows of tokens (R, T) through the whole model."""
    config: dict[str, Any] = oracle.config
    first = config["first_k_dense_replace"]
    experts = [
        config["num_experts"] if i >= first else 0 for i in range(len(oracle.layers))
    ]
    truths = [Truth(corpora, count) for count in experts]
    for row, corpus in zip(tokens, labels, strict=True):
        running = oracle.weights["model.embed_tokens.weight"][row]
        stack: list[Array] = []
        for i, truth in enumerate(truths):
            w = oracle.layers[i]
            running, _, trace = oracle.layer(i, running, stack)
            x = oracle.norm(trace["mlp_in"], w["post_attention_layernorm.weight"])
            reads = oracle.norm(trace["attn_in"], w["input_layernorm.weight"])
            truth.read("attention", reads, corpus)
            truth.read("feed", x, corpus)
            if truth.experts:
                record_experts(truth, x, corpus, oracle.experts[i], config)
            else:
                gate, up = (
                    linear(x, w[f"mlp.{name}_proj.weight"]) for name in ("gate", "up")
                )
                beta, cap = (
                    config["activation_situ_beta"],
                    config["activation_situ_linear_beta"],
                )
                truth.read("mlp.down_proj", situ(gate, up, beta, cap), corpus)
    return truths
