"""Where every stored tensor must end up in the model: a second, independent mapping.

It knows the three families of names (Moonshot's source, mlx-lm's, the pipenetwork
converter's) by rules of its own and shares nothing with the package.
"""

import re
from typing import Any

import mlx.core as mx
import numpy as np
from closeness import to_numpy
from golden_data import Case
from oracle_mxfp4 import affine

Tensors = dict[str, mx.array]

VISION = ("vision_tower.", "mm_projector.")
PARTS = ("weight", "scales", "biases")
EXPERT_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def expected_parameters(case: Case) -> Tensors:
    """Our parameter names with the tensors that ``case`` stores for them.

    Bit for bit what is stored, rearranged; only a quantised router is computed with:
    its float32 values.
    """
    text = case.text_config
    tensors = {
        _plain_name(name): tensor
        for name, tensor in case.stored.items()
        if not name.startswith(VISION)
    }
    for i in range(text["num_hidden_layers"]):
        at = f"model.layers.{i}."
        if i >= text["first_k_dense_replace"]:
            _stack_experts(tensors, f"{at}mlp.")
            _dequantise_router(tensors, f"{at}mlp.gate.", text["hidden_size"])
        if i + 1 in text["linear_attn_config"]["kda_layers"]:
            _fuse_kda(tensors, f"{at}self_attn.", text["linear_attn_config"])
        else:
            _split_kv_b(tensors, f"{at}self_attn.", text)
    return {f"language_model.{name}": tensor for name, tensor in tensors.items()}


def _plain_name(name: str) -> str:
    """A stored name without prefix, in mlx-lm's words where only words differ."""
    name = name.removeprefix("language_model.")
    name = name.replace(".block_sparse_moe.", ".mlp.")
    name = name.replace(
        "mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"
    )
    name = re.sub(r"_res\.(norm|proj)_weight$", r"_res_\1.weight", name)
    return name


def _take(tensors: Tensors, names: list[str]) -> list[mx.array]:
    return [tensors.pop(name) for name in names if name in tensors]


def _stack_experts(tensors: Tensors, at: str) -> None:
    """Source format: one expert a tensor becomes one row of a bank."""
    found = {
        int(match[1])
        for name in tensors
        if (match := re.match(re.escape(at) + r"experts\.(\d+)\.", name))
    }
    if not found:
        return
    assert found == set(range(len(found)))
    for stored, ours in EXPERT_MATRICES.items():
        for suffix, part in (("weight_packed", "weight"), ("weight_scale", "scales")):
            names = [f"{at}experts.{n}.{stored}.{suffix}" for n in range(len(found))]
            bank = mx.stack(_take(tensors, names))
            if part == "weight":
                bank = bank.view(mx.uint32)
            tensors[f"{at}switch_mlp.{ours}.{part}"] = bank


def _dequantise_router(tensors: Tensors, at: str, inputs: int) -> None:
    if f"{at}scales" not in tensors:
        return
    words, scales, biases = _take(tensors, [f"{at}{part}" for part in PARTS])
    bits = words.shape[-1] * 32 // inputs
    values = affine(to_numpy(words), to_numpy(scales), to_numpy(biases), bits)
    tensors[f"{at}weight"] = mx.array(values.astype(np.float32))


def _fuse_kda(tensors: Tensors, at: str, linear: dict[str, Any]) -> None:
    for part in PARTS:
        rows = _take(tensors, [f"{at}{name}_proj.{part}" for name in "qkv"])
        if rows:
            assert len(rows) == 3
            tensors[f"{at}qkv_proj.{part}"] = mx.concatenate(rows)
    source = _take(tensors, [f"{at}{name}_conv1d.weight" for name in "qkv"])
    convs = [conv.swapaxes(1, 2) for conv in source]  # [D, 1, 4] to [D, 4, 1]
    convs += _take(tensors, [f"{at}{name}_conv.conv.weight" for name in "qkv"])
    if convs:
        assert len(convs) == 3
        tensors[f"{at}qkv_conv.conv.weight"] = mx.concatenate(convs)
    tensors[f"{at}A_log"] = tensors[f"{at}A_log"].reshape(-1)[: linear["num_heads"]]


def _split_kv_b(tensors: Tensors, at: str, text: dict[str, Any]) -> None:
    """Source format: the joint expansion as one matrix a head for keys and values."""
    joint = tensors.pop(f"{at}kv_b_proj.weight", None)
    if joint is None:
        return
    nope = text["qk_nope_head_dim"]
    heads = joint.reshape(text["num_attention_heads"], nope + text["v_head_dim"], -1)
    tensors[f"{at}embed_q.weight"] = heads[:, :nope].swapaxes(1, 2)
    tensors[f"{at}unembed_out.weight"] = heads[:, nope:]
