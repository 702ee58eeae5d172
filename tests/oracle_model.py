"""Float64 truth, part 6: attention residuals and the whole language model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from closeness import to_numpy
from oracle_kda import kda
from oracle_mla import mla
from oracle_moe import latent_moe
from oracles import linear, mlp, rms_norm, softmax

Array = np.ndarray
PREFIX = "language_model."


def mix(
    stack: list[Array], running: Array, norm: Array, proj: Array, eps: float
) -> tuple[Array, Array]:
    """Attention-residual mixture [T, h] of the stack and the running sum, and weights.

    Scores come from the normed candidates, the mixture from the plain ones.
    """
    candidates = np.stack([*stack, running], axis=1)  # [T, n + 1, h]
    scores = rms_norm(candidates, norm, eps) @ proj.reshape(-1)
    weights = softmax(scores)
    return np.einsum("tn,tnh->th", weights, candidates), weights


def float64_weights(stored: dict[str, Any]) -> dict[str, Array]:
    """Source tensors of the language model as float64; packed bytes stay bytes."""
    weights = {}
    for name, tensor in stored.items():
        if name.startswith(PREFIX):
            array = to_numpy(tensor)
            packed = array.dtype == np.uint8
            weights[name[len(PREFIX) :]] = array if packed else array.astype(np.float64)
    return weights


def below(weights: dict[str, Array], prefix: str) -> dict[str, Array]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {k[len(prefix) :]: v for k, v in weights.items() if k.startswith(prefix)}


@dataclass
class Oracle:
    """The language model of a source checkpoint, for one token sequence at a time."""

    weights: dict[str, Array]
    config: dict[str, Any]

    def __post_init__(self) -> None:
        layers = range(self.config["num_hidden_layers"])
        self.layers = [below(self.weights, f"model.layers.{i}.") for i in layers]
        self.attention = [below(w, "self_attn.") for w in self.layers]
        self.experts = [below(w, "block_sparse_moe.") for w in self.layers]

    def is_kda(self, i: int) -> bool:
        return i + 1 in self.config["linear_attn_config"]["kda_layers"]

    def attend(self, i: int, x: Array, state: Any = None) -> tuple[Array, Any, dict]:
        """``self_attn`` of layer i: output, the state afterwards, insides."""
        if self.is_kda(i):
            return kda(x, self.attention[i], self.config, state)
        return mla(x, self.attention[i], self.config, state)

    def feed(self, i: int, x: Array) -> tuple[Array, dict[str, Array]]:
        """The MoE or the dense MLP of layer i, and what its router did."""
        if i >= self.config["first_k_dense_replace"]:
            return latent_moe(x, self.experts[i], self.config)
        return mlp(x, self.layers[i], "mlp.", self.config), {}

    def norm(self, x: Array, weight: Array) -> Array:
        return rms_norm(x, weight, self.config["rms_norm_eps"])

    def mix_with(
        self, weights: dict, name: str, stack: list[Array], running: Array
    ) -> tuple[Array, Array | None]:
        """The mixture with ``name``'s vectors; the running sum without a stack."""
        if not stack:
            return running, None
        norm, proj = weights[f"{name}_norm.weight"], weights[f"{name}_proj.weight"]
        return mix(stack, running, norm, proj, self.config["rms_norm_eps"])

    def residual(
        self, i: int, name: str, stack: list[Array], running: Array
    ) -> tuple[Array, Array | None]:
        """The mixture before attention (``self_attention``) or feed (``mlp``)."""
        return self.mix_with(self.layers[i], f"{name}_res", stack, running)

    def layer(
        self, i: int, running: Array, stack: list[Array], state: Any = None
    ) -> tuple[Array, Any, dict[str, Any]]:
        """Layer i: the running sum and the state afterwards, and a trace.

        Appends to ``stack`` where a block of residuals ends.
        """
        trace: dict[str, Any] = {}
        w = self.layers[i]
        x, trace["attn_res_probs"] = self.residual(i, "self_attention", stack, running)
        trace["attn_in"] = x
        block = self.config["attn_res_block_size"]
        new_block = block is not None and i % block == 0
        if new_block:
            stack.append(running)
        y, state, insides = self.attend(
            i, self.norm(x, w["input_layernorm.weight"]), state
        )
        trace |= {"attn_out": y, **insides}
        running = y if new_block else running + y
        x, trace["mlp_res_probs"] = self.residual(i, "mlp", stack, running)
        y, routing = self.feed(i, self.norm(x, w["post_attention_layernorm.weight"]))
        trace |= {"mlp_in": x, "mlp_out": y, **routing, "out": running + y}
        return running + y, state, trace

    def __call__(
        self, ids: Array, states: list[Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Logits [T, vocab] of ids [T], and a trace under the golden files' names.

        ``states`` is a list with one entry per layer (None at first); it is updated.
        """
        trace: dict[str, Any] = {}
        states = [None] * len(self.layers) if states is None else states
        running = self.weights["model.embed_tokens.weight"][ids]
        stack: list[Array] = []
        for i in range(len(self.layers)):
            running, states[i], seen = self.layer(i, running, stack, states[i])
            trace |= {f"layers.{i}.{name}": value for name, value in seen.items()}
        x, trace["output_res_probs"] = self.mix_with(
            self.weights, "model.output_attn_res", stack, running
        )
        if stack:
            trace["block_residual"] = np.stack(stack, axis=1)
        trace["output_res_out"] = x
        trace["final_hidden"] = self.norm(x, self.weights["model.norm.weight"])
        tied = self.config.get("tie_word_embeddings", False)
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        trace["logits"] = linear(trace["final_hidden"], head)
        return trace["logits"], trace
