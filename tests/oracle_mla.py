"""Float64 truth, part 4: gated NoPE multi-head latent attention, one sequence."""

from dataclasses import dataclass

import numpy as np
from oracles import linear, rms_norm, sigmoid, softmax

Array = np.ndarray

#: Epsilon of the two norms inside MLA; not ``rms_norm_eps``.
LATENT_EPS = 1e-6


@dataclass
class MlaCache:
    """Normalised latents [S, kv_lora_rank] and shared key parts [S, rope]."""

    latent: Array
    shared_key: Array

    @classmethod
    def empty(cls, config: dict) -> "MlaCache":
        return cls(
            np.zeros((0, config["kv_lora_rank"])),
            np.zeros((0, config["qk_rope_head_dim"])),
        )


def mla(
    x: Array, weights: dict[str, Array], config: dict, cache: MlaCache | None = None
) -> tuple[Array, MlaCache, dict[str, Array]]:
    """One MLA layer on x [T, hidden]: output, the cache afterwards, its insides.

    ``weights`` holds the layer's ``self_attn`` tensors by their last names. No rotary
    embedding is applied: the "rope" part of a key is plain dimensions that all heads
    share.
    """
    heads = config["num_attention_heads"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    rank, value_size = config["kv_lora_rank"], config["v_head_dim"]
    cache = cache or MlaCache.empty(config)

    if config["q_lora_rank"] is None:
        query = linear(x, weights["q_proj.weight"])
    else:
        low = linear(x, weights["q_a_proj.weight"])
        low = rms_norm(low, weights["q_a_layernorm.weight"], LATENT_EPS)
        query = linear(low, weights["q_b_proj.weight"])
    query = query.reshape(len(x), heads, nope + rope)

    joint = linear(x, weights["kv_a_proj_with_mqa.weight"])
    latent = rms_norm(joint[:, :rank], weights["kv_a_layernorm.weight"], LATENT_EPS)
    cache = MlaCache(
        np.concatenate([cache.latent, latent]),
        np.concatenate([cache.shared_key, joint[:, rank:]]),
    )
    total = len(cache.latent)
    expanded = linear(cache.latent, weights["kv_b_proj.weight"])
    expanded = expanded.reshape(total, heads, nope + value_size)
    shared = np.repeat(cache.shared_key[:, None, :], heads, axis=1)
    keys = np.concatenate([expanded[..., :nope], shared], axis=-1)
    values = expanded[..., nope:]

    scores = np.einsum("thd,shd->hts", query, keys) * (nope + rope) ** -0.5
    position = np.arange(total - len(x), total)
    future = np.arange(total)[None, :] > position[:, None]
    probs = softmax(np.where(future, -np.inf, scores))
    out = np.einsum("hts,shd->thd", probs, values).reshape(len(x), -1)
    if config["mla_use_output_gate"]:
        out = out * sigmoid(linear(x, weights["g_proj.weight"]))
    insides = {"kv_latent": latent, "k_rope": joint[:, rank:]}
    return linear(out, weights["o_proj.weight"]), cache, insides
