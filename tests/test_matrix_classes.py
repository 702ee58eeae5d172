"""Every matrix that can be quantised has a class, in the released model and others."""

from collections import Counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from plans import wide_config

from kimi_k3.checkpoint.names import PREFIX
from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.checkpoint.stored_format import StoredFormat
from kimi_k3.config import ModelArgs
from kimi_k3.errors import PlanError
from kimi_k3.models import Model
from kimi_k3.planning.matrix_classes import (
    CLASS_BITS,
    affine_format,
    class_matrices,
    inputs_of,
    matrix_class,
    refuse_unknown_classes,
)

#: Matrices of one decoder layer of each kind in the release.
MLA = {
    *("mla.q_a_proj", "mla.q_b_proj", "mla.kv_a_proj_with_mqa", "mla.kv_b_proj"),
    *("mla.g_proj", "mla.o_proj"),
}
KDA = {
    *("kda.qkv_proj", "kda.f_a_proj", "kda.f_b_proj", "kda.b_proj", "kda.g_proj"),
    "kda.o_proj",
}
DENSE = {f"dense.{name}_proj" for name in ("gate", "up", "down")}
MOE = {f"shared_experts.{name}_proj" for name in ("gate", "up", "down")} | {
    "routed_expert_down_proj",
    "routed_expert_up_proj",
}

#: Parameters of two dimensions or more, outside routed experts, that stay as they are.
KEPT = (".mlp.gate.weight", "_res_proj.weight", ".qkv_conv.conv.weight")


def built(config: dict[str, Any]) -> Model:
    return Model(ModelArgs.from_dict(config))


@pytest.fixture(scope="module")
def full() -> Model:
    return built(full_size_config())


def unclassed(model: Model) -> set[str]:
    """Parameters that look like matrices, but belong to no class."""
    covered = {f"{path}.weight" for _, path, _ in class_matrices(model)}
    flat: Any = tree_flatten(model.parameters())
    return {
        name
        for name, array in flat
        if array.ndim > 1
        and ".switch_mlp." not in name
        and not name.endswith(KEPT)
        and name not in covered
    }


def test_the_release_has_these_classes_and_no_others(full: Model):
    counts = Counter(name for name, _, _ in class_matrices(full))
    wanted = dict.fromkeys(MLA, 24) | dict.fromkeys(KDA, 69) | dict.fromkeys(MOE, 92)
    wanted |= dict.fromkeys(DENSE, 1) | {"embed_tokens": 1, "lm_head": 1}
    wanted["mla.kv_b_proj"] = 48  # its two absorbed halves
    assert counts == wanted


@pytest.mark.parametrize(
    "text",
    [
        {},
        {"tie_word_embeddings": True},
        {"q_lora_rank": None},
        {"first_k_dense_replace": 2},
        {"num_shared_experts": 0},
        {"routed_expert_hidden_size": None},
        {"linear_attn_config": {"use_full_rank_gate": False}},
    ],
    ids=lambda text: next(iter(text), "T1"),
)
def test_no_matrix_is_left_out(text: dict[str, Any]):
    model = built(wide_config(**text))
    paths = [path for _, path, _ in class_matrices(model)]
    assert len(paths) == len(set(paths)) > 20
    assert unclassed(model) == set()


def test_no_matrix_of_the_release_is_left_out(full: Model):
    assert unclassed(full) == set()


def test_a_new_kind_of_matrix_would_be_noticed():
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.zeros((8, 8))

    model = built(wide_config())
    model.model.layers[2].mlp.extra = Plain()
    assert unclassed(model) == {f"{PREFIX}model.layers.2.mlp.extra.weight"}
    model.model.layers[2].mlp.extra = nn.Linear(8, 8, bias=False)
    assert unclassed(model) == set()
    assert "extra" in {name for name, _, _ in class_matrices(model)}


def test_names_say_where_a_matrix_is():
    text = ModelArgs.from_dict(wide_config()).text_config
    layers = f"{PREFIX}model.layers"
    for module, name in {
        f"{layers}.1.self_attn.o_proj": "kda.o_proj",
        f"{layers}.3.self_attn.o_proj": "mla.o_proj",
        f"{layers}.3.self_attn.embed_q": "mla.kv_b_proj",
        f"{layers}.3.self_attn.unembed_out": "mla.kv_b_proj",
        f"{layers}.0.mlp.up_proj": "dense.up_proj",
        f"{layers}.1.mlp.shared_experts.up_proj": "shared_experts.up_proj",
        f"{layers}.1.mlp.routed_expert_up_proj": "routed_expert_up_proj",
        f"{PREFIX}model.embed_tokens": "embed_tokens",
        f"{PREFIX}lm_head": "lm_head",
    }.items():
        assert matrix_class(module, text) == name


def test_classes_of_a_quantised_model_are_the_same():
    model = built(wide_config())
    before = [(name, path) for name, path, _ in class_matrices(model)]
    wide = {path for _, path, m in class_matrices(model) if inputs_of(m) % 32 == 0}
    nn.quantize(model, 32, 4, class_predicate=lambda path, _: path in wide)
    assert [(name, path) for name, path, _ in class_matrices(model)] == before
    assert wide


def test_routers_and_routed_experts_are_in_no_class(full: Model):
    for _, path, _ in class_matrices(full):
        assert ".switch_mlp" not in path
        assert not path.endswith("mlp.gate")


@pytest.mark.parametrize(
    ("inputs", "group"), [(7168, 64), (64, 64), (96, 32), (32, 32), (48, None)]
)
def test_groups_divide_the_columns(inputs: int, group: int | None):
    for bits in CLASS_BITS[1:]:
        wanted = StoredFormat("affine", bits, group) if group else None
        assert affine_format(bits, inputs) == wanted
    assert affine_format(16, inputs) is None


def test_an_unknown_class_is_named():
    refuse_unknown_classes(["a"], ["b", "a"])
    with pytest.raises(PlanError, match=r"called 'c'; there are a, b\."):
        refuse_unknown_classes(["a", "c"], ["b", "a"])
