"""Float64 truth, part 5: the router and the experts on a shared latent."""

import numpy as np
from oracle_mxfp4 import mxfp4
from oracles import linear, mlp, rms_norm, sigmoid, situ

Array = np.ndarray


def biased_scores(x: Array, gate: Array, bias: Array) -> tuple[Array, Array]:
    """Sigmoid scores [T, experts] and the same with the selection bias added."""
    scores = sigmoid(linear(x, gate))
    return scores, scores + bias


def drop_weak_groups(biased: Array, config: dict) -> Array:
    """Biased scores with every expert outside the best groups at -inf.

    A group counts as much as its two best experts together.
    """
    groups, kept = config.get("num_expert_group", 1), config.get("topk_group", 1)
    if groups <= kept:
        return biased
    split = biased.reshape(len(biased), groups, -1)
    worth = np.sort(split, axis=-1)[..., -2:].sum(axis=-1)
    best = np.argsort(-worth, axis=-1)[:, :kept]
    allowed = np.zeros_like(worth, dtype=bool)
    np.put_along_axis(allowed, best, True, axis=-1)
    return np.where(allowed[..., None], split, -np.inf).reshape(biased.shape)


def route(
    x: Array, gate: Array, bias: Array, config: dict
) -> tuple[Array, Array, Array]:
    """Chosen experts [T, k] in ascending order, their weights, the deciding gap [T].

    The bias selects only; the weights are the plain scores of the chosen experts. The
    gap is the biased score of the k-th expert minus that of the best one left out.
    """
    top = config["num_experts_per_token"]
    scores, biased = biased_scores(x, gate, bias)
    biased = drop_weak_groups(biased, config)
    order = np.argsort(-biased, axis=-1, kind="stable")
    chosen = np.sort(order[:, :top], axis=-1)
    weights = np.take_along_axis(scores, chosen, axis=-1)
    if config.get("moe_renormalize", True) and top > 1:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    ranked = np.take_along_axis(biased, order, axis=-1)
    if top < ranked.shape[1]:
        gap = ranked[:, top - 1] - ranked[:, top]
    else:
        gap = np.full(len(x), np.inf)
    return chosen, weights * config.get("routed_scaling_factor", 1.0), gap


def expert(x: Array, weights: dict[str, Array], number: int, config: dict) -> Array:
    """Expert ``number`` on x [n, latent]; its tensors stay packed in ``weights``."""

    def matrix(which: str) -> Array:
        stem = f"experts.{number}.{which}."
        return mxfp4(weights[f"{stem}weight_packed"], weights[f"{stem}weight_scale"])

    beta, cap = config["activation_situ_beta"], config["activation_situ_linear_beta"]
    hidden = situ(linear(x, matrix("w1")), linear(x, matrix("w3")), beta, cap)
    return linear(hidden, matrix("w2"))


def latent_moe(
    x: Array, weights: dict[str, Array], config: dict
) -> tuple[Array, dict[str, Array]]:
    """The whole mixture on x [T, hidden]: output, and what the router did.

    ``weights`` holds the layer's ``block_sparse_moe`` tensors by their last names.
    """
    chosen, shares, gap = route(
        x, weights["gate.weight"], weights["gate.e_score_correction_bias"], config
    )
    latent = config.get("routed_expert_hidden_size") is not None
    inner = linear(x, weights["routed_expert_down_proj.weight"]) if latent else x
    mixed = np.zeros_like(inner)
    for number in np.unique(chosen):
        token, slot = np.nonzero(chosen == number)
        y = expert(inner[token], weights, int(number), config)
        mixed[token] += shares[token, slot][:, None] * y
    if latent and config["latent_moe_use_norm"]:
        norm = weights["routed_expert_norm.weight"]
        mixed = rms_norm(mixed, norm, config["rms_norm_eps"])
    if latent:
        mixed = linear(mixed, weights["routed_expert_up_proj.weight"])
    if config["num_shared_experts"]:
        mixed = mixed + mlp(x, weights, "shared_experts.", config)
    return mixed, {"topk_idx": chosen, "topk_weight": shares, "router_gap": gap}
