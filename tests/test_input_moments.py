"""Second moments of every matrix's inputs, against float64; nothing is left out."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from closeness import assert_close, assert_same, relative_error
from loading import load_stored
from mlx_lm.models.base import create_attention_mask
from oracle_calibration import record_model
from oracle_pair import Pair, make_pair
from oracles import linear, rms_norm
from tiny_k3 import t0_model, write_t2

from kimi_k3.build.input_moments import (
    LayerMoments,
    recordable,
    recorded_matrices,
)
from kimi_k3.build.step_labels import StepLabels
from kimi_k3.errors import CalibrationError, PartialResultError
from kimi_k3.models.attention_residuals import ResidualStack

CORPORA = 2
REL = 1e-5


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("t1"))


def run_layers(
    model: Any, ids: np.ndarray, labels: np.ndarray, record: bool = True
) -> tuple[list[dict[str, np.ndarray]], mx.array]:
    """The moments of each layer, rows one by one, and the last residual sums."""
    inner = model.model
    found: list[dict[str, np.ndarray]] = []
    states = [
        (inner.embed_tokens(mx.array(row[None])), ResidualStack(1e-5)) for row in ids
    ]
    for layer in inner.layers:
        with recorded_matrices(layer, CORPORA) as recorder:
            for i, (prefix, stack) in enumerate(states):
                recorder.labels = StepLabels(labels[i], CORPORA)
                mask = None
                if not layer.is_linear:
                    mask = create_attention_mask(prefix, None, return_array=True)
                states[i] = layer(prefix, stack, mask, None), stack
                recorder.collect()
        found.append(recorder.moments())
    return found, mx.concatenate([prefix for prefix, _ in states])


IDS = np.random.default_rng(5).integers(0, 256, (3, 21))
LABELS = np.where(np.arange(21) < [[21], [15], [9]], np.arange(21) // 4 % CORPORA, -1)

#: What the oracle calls each thing that several matrices read.
SAME_INPUT = {
    "attention": (
        *(f"self_attn.{n}_proj" for n in ("qkv", "f_a", "b", "g", "q_a")),
        "self_attn.kv_a_proj_with_mqa",
    ),
    "feed": (
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.routed_expert_down_proj",
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
    "mlp.down_proj": ("mlp.down_proj",),
}


def test_moments_are_the_oracle(pair: Pair):
    found, _ = run_layers(pair.model, IDS, LABELS)
    truths = record_model(pair.oracle, IDS, LABELS, CORPORA)
    compared = 0
    for i, (layer, truth) in enumerate(zip(found, truths, strict=True)):
        for source, names in SAME_INPUT.items():
            for name in set(names) & set(layer):
                where = f"layer {i} {name}"
                assert_close(layer[name], truth.moments[source], rel=REL, where=where)
                compared += 1
    assert compared == 4 * 4 + 3 + 3 + 4 * 3
    # Broken twin: the corpora of the tokens shifted by one place.
    moved, _ = run_layers(pair.model, IDS, np.roll(LABELS, 1, axis=1))
    wrong = relative_error(moved[0]["mlp.up_proj"], truths[0].moments["feed"])
    assert wrong > 100 * REL


def test_the_absorbed_keys_meet_the_queries(pair: Pair):
    """MLA of layer 3: what embed_q and unembed_out are multiplied with."""
    found, _ = run_layers(pair.model, IDS, LABELS)
    config, weights = pair.oracle.config, pair.oracle.attention[3]
    heads, nope = config["num_attention_heads"], config["qk_nope_head_dim"]
    queries = np.zeros((CORPORA, heads, nope))
    latents = np.zeros((CORPORA, config["kv_lora_rank"]))
    for row, corpus in zip(IDS, LABELS, strict=True):
        _, trace = pair.oracle(row)
        x = pair.oracle.norm(
            trace["layers.3.attn_in"], pair.oracle.layers[3]["input_layernorm.weight"]
        )
        low = linear(x, weights["q_a_proj.weight"])
        low = rms_norm(low, weights["q_a_layernorm.weight"], 1e-6)
        query = linear(low, weights["q_b_proj.weight"]).reshape(len(x), heads, -1)
        for token, label in enumerate(corpus):
            if label >= 0:
                queries[label] += query[token, :, :nope] ** 2
                latents[label] += trace["layers.3.kv_latent"][token] ** 2
    assert_close(found[3]["self_attn.embed_q"], queries, rel=REL, where="embed_q")
    assert_close(found[3]["self_attn.unembed_out"], latents, rel=REL, where="unembed")


def quantisable(model: Any) -> list[set[str]]:
    """By layer, the modules that mlx-lm's converter would quantise."""
    seen: set[str] = set()

    def note(path: str, module: nn.Module) -> bool:
        if hasattr(module, "to_quantized") and model.quant_predicate(path, module):
            seen.add(path)
        return False

    nn.quantize(model, class_predicate=note)
    prefix = "language_model.model.layers."
    return [
        {
            path.removeprefix(f"{prefix}{i}.")
            for path in seen
            if path.startswith(f"{prefix}{i}.")
        }
        for i in range(len(model.layers))
    ]


def test_every_matrix_that_can_be_quantised_is_recorded():
    model = t0_model()
    found, _ = run_layers(model, IDS, LABELS)
    for layer, names in zip(found, quantisable(model), strict=True):
        experts = {name for name in names if ".switch_mlp." in name}
        assert len(experts) in (0, 3)
        assert names - experts == set(layer)
        assert not any(name.endswith("mlp.gate") for name in layer)


def test_a_matrix_of_an_unknown_kind_is_refused():
    class Odd(nn.Module):
        def to_quantized(self, **_: object) -> nn.Module:
            return self

    layer = t0_model().layers[1]
    layer.mlp.odd = Odd()
    with pytest.raises(CalibrationError, match=r"mlp\.odd is a Odd, .*--moments off"):
        recordable(layer)


def test_the_layer_does_not_notice(tmp_path: Path):
    models = t0_model(), load_stored(write_t2(tmp_path / "t2"))
    nn.quantize(models[0], group_size=32, bits=8, class_predicate=eight_bits)
    for model in models:
        before = [dict(layer.named_modules()) for layer in model.layers]
        stack, h = ResidualStack(1e-5), model.model.embed_tokens(mx.array(IDS))
        mask = create_attention_mask(h, None, return_array=True)
        for layer in model.layers:
            h = layer(h, stack, None if layer.is_linear else mask, None)
        _, got = run_layers(model, IDS, LABELS)
        assert relative_error(got, h) < 1e-2
        with recorded_matrices(model.layers[3], CORPORA) as recorder:
            recorder.labels = StepLabels(LABELS, CORPORA)
            watched = model.layers[3](h, again(stack), mask, None)
        assert_same(
            watched, model.layers[3](h, again(stack), mask, None), where="layer"
        )
        after = [dict(layer.named_modules()) for layer in model.layers]
        for first, second in zip(before, after, strict=True):
            assert set(first) == set(second)
            assert all(second[name] is module for name, module in first.items())


def eight_bits(path: str, module: nn.Module) -> bool:
    weight: Any = module.get("weight")
    return hasattr(module, "to_quantized") and weight.shape[-1] % 32 == 0


def again(stack: ResidualStack) -> ResidualStack:
    copy = ResidualStack(stack.eps)
    copy.blocks, copy.inverse_rms = stack.blocks, stack.inverse_rms
    return copy


def test_tokens_without_fitting_labels_are_refused():
    layer = t0_model().layers[0]
    x = mx.zeros((1, 4, 64))
    with recorded_matrices(layer, CORPORA) as recorder:
        with pytest.raises(CalibrationError, match="without labels"):
            layer.mlp(x)
        recorder.labels = StepLabels(np.zeros(5), CORPORA)
        with pytest.raises(CalibrationError, match="for 5 labelled tokens"):
            layer.mlp(x)


def small_moments() -> LayerMoments:
    rng = np.random.default_rng(0)
    matrices = {
        name: rng.random((2, 8), np.float32) for name in ("mlp.b", "self_attn.a")
    }
    experts = rng.random((3, 4), np.float32), rng.random((3, 6), np.float32)
    return LayerMoments(np.array([5, 7]), matrices, *experts)


def test_a_file_comes_back_and_is_always_the_same(tmp_path: Path):
    moments = small_moments()
    moments.save(tmp_path / "a")
    small_moments().save(tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    loaded = LayerMoments.load(tmp_path / "a")
    assert list(loaded.matrices) == ["mlp.b", "self_attn.a"]
    for name, array in moments.matrices.items():
        assert_same(loaded.of(name), array, where=name)
    assert_same(loaded.tokens, moments.tokens, where="tokens")
    gate, down = "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.bank_lo.down_proj"
    assert_same(loaded.of(gate), moments.gate_up, where=gate)
    assert_same(loaded.of(down), moments.down, where=down)
    with pytest.raises(CalibrationError, match=r"no moments of mlp\.c"):
        loaded.of("mlp.c")


def test_a_damaged_file_is_named(tmp_path: Path):
    path = tmp_path / "layer-001.npz"
    small_moments().save(path)
    whole, messages = path.read_bytes(), []
    for place in range(0, len(whole), 97):
        path.write_bytes(
            whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :]
        )
        try:
            loaded = LayerMoments.load(path)
        except PartialResultError as error:
            messages.append(str(error))
        else:
            assert_same(loaded.of("mlp.b"), small_moments().of("mlp.b"), where="mlp.b")
    assert len(messages) > len(whole) // 97 / 2
    assert all("layer-001.npz" in m and "--restart" in m for m in messages)


def test_numbers_that_are_none_are_refused():
    with pytest.raises(CalibrationError, match=r"inputs of mlp\.x overflow"):
        LayerMoments(np.array([1]), {"mlp.x": np.array([[np.inf]], np.float32)})
