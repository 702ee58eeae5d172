"""Bytes of a plan = those of the build's tensors; bytes of a token = the model's."""

import mlx.core as mx
import numpy as np
import pytest
from plans import random_plan, wide_config
from tiny_k3 import t1_config

from kimi_k3.checkpoint.source_layout import full_size_config, source_tensors
from kimi_k3.checkpoint.stored_format import StoredFormat
from kimi_k3.conversion.build_layout import build_layout, build_model
from kimi_k3.errors import PlanError
from kimi_k3.machine.bench import bytes_per_token
from kimi_k3.planning.expert_plan import HIGH, ExpertPlan, LayerPlan
from kimi_k3.planning.matrix_classes import CLASS_BITS
from kimi_k3.planning.plan_sizes import EMBEDDING, SourceSizes, matrix_bytes

TYPES = {"BF16": mx.bfloat16, "F32": mx.float32, "U8": mx.uint8, "U32": mx.uint32}


@pytest.fixture(scope="module")
def full() -> SourceSizes:
    return SourceSizes.of(full_size_config())


@pytest.fixture(scope="module")
def tiny() -> SourceSizes:
    return SourceSizes.of(wide_config())


# Matrices and experts by hand


def test_one_expert_of_the_release(full: SourceSizes):
    """Three matrices of 3072 × 3584, a row of the router, one correction bias."""
    weights, router = 3 * 3072 * 3584, 2 * 7168 + 4
    assert full.router_bytes == router
    assert full.expert_bytes(HIGH) == weights // 2 + weights // 32 + router
    for bits in (2, 3, 4):
        low = StoredFormat("affine", bits, 64)
        assert full.expert_bytes(low) == weights * bits // 8 + weights // 16 + router


@pytest.mark.parametrize(("bits", "nbytes"), [(2, 20), (3, 28), (8, 68)])
def test_a_matrix_has_codes_scales_and_biases(bits: int, nbytes: int):
    assert matrix_bytes(3, 64, StoredFormat("affine", bits, 64)) == 3 * nbytes
    assert matrix_bytes(3, 64, None) == 3 * 128


def test_groups_that_do_not_divide_the_columns():
    with pytest.raises(PlanError, match="32 columns cannot be stored in 2 bits, in "):
        matrix_bytes(4, 32, StoredFormat("affine", 2, 64))
    narrow = SourceSizes.of(t1_config())
    plan = ExpertPlan.identity(narrow.args.text_config)
    narrow.plan_bytes(plan)
    layers = {**plan.layers, 1: LayerPlan((0, 1, 2, 3), (4,))}
    with pytest.raises(PlanError, match="32 columns"):
        narrow.plan_bytes(ExpertPlan(16, 4, layers))


# A whole build


def test_the_release_as_it_is(full: SourceSizes):
    identity = ExpertPlan.identity(full.args.text_config)
    stored = sum(tensor.nbytes for tensor in source_tensors(full.args))
    padding = 69 * 4 * (128 - 96)  # of A_log
    assert full.plan_bytes(identity) == stored - padding == 1_560_860_316_032
    assert sum(full.class_bytes(identity).values()) == sum(
        sizes[16] for sizes in full.classes.values()
    )


@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_those_of_the_tensors(tiny: SourceSizes, seed: int):
    plan = random_plan(tiny, seed)
    assert tiny.plan_bytes(plan) == build_layout(wide_config(), plan).nbytes


@pytest.mark.parametrize("seed", range(2))
def test_and_at_full_size(full: SourceSizes, seed: int):
    plan = random_plan(full, seed)
    assert full.plan_bytes(plan) == build_layout(full_size_config(), plan).nbytes


def test_one_byte_less_would_be_seen(tiny: SourceSizes):
    """The broken twin: a plan that drops one expert more is not of the same size."""
    plan = random_plan(tiny, 0)
    layer = next(n for n, each in plan.layers.items() if len(each.high) > 4)
    fewer = LayerPlan(plan.layers[layer].high[:-1], plan.layers[layer].low)
    changed = ExpertPlan(
        plan.experts,
        plan.top_k,
        {**plan.layers, layer: fewer},
        low_bits=plan.low_bits,
        bits=plan.bits,
    )
    assert tiny.plan_bytes(changed) != build_layout(wide_config(), plan).nbytes


def test_bits_that_change_nothing_are_not_listed():
    """A hidden size of 48 is in no groups; what is read in rows of 128 is."""
    odd = SourceSizes.of(wide_config(hidden_size=48))
    assert set(odd.classes["kda.qkv_proj"]) == {16}
    assert set(odd.classes["kda.o_proj"]) == set(CLASS_BITS)
    plan = ExpertPlan(
        16,
        4,
        ExpertPlan.identity(odd.args.text_config).layers,
        bits={"kda.qkv_proj": 4},
    )
    assert (
        odd.plan_bytes(plan) == build_layout(wide_config(hidden_size=48), plan).nbytes
    )


def test_an_unknown_class(tiny: SourceSizes):
    layers = ExpertPlan.identity(tiny.args.text_config).layers
    plan = ExpertPlan(16, 4, layers, bits={"kda.q_proj": 8})
    message = r"no class of matrices is called 'kda.q_proj'; there are dense.down_proj,"
    for size in (tiny.plan_bytes, tiny.bytes_per_token, tiny.class_bytes):
        with pytest.raises(PlanError, match=message):
            size(plan)
    with pytest.raises(PlanError, match=message):
        build_layout(wide_config(), plan)


# A token


@pytest.mark.parametrize("seed", range(4))
def test_a_token_reads_what_bench_counts(tiny: SourceSizes, seed: int):
    plan = random_plan(tiny, seed)
    layout = build_layout(wide_config(), plan)
    model = build_model(layout.config, plan)
    stored = [
        (tensor.name, mx.zeros(tensor.shape, TYPES[tensor.dtype]))
        for shard in layout.shards
        for tensor in shard.tensors
        if tensor.name.startswith("language_model.")
    ]
    model.load_weights(stored)
    assert abs(tiny.bytes_per_token(plan) - bytes_per_token(model)) <= 1
    fewer = random_plan(tiny, seed + 100)
    assert abs(tiny.bytes_per_token(fewer) - bytes_per_token(model)) > 1


def test_a_token_of_the_published_build(full: SourceSizes):
    """25.8 GB of routed experts and 60.8 GB of everything else, at 8 bits.

    The latter counts the embedding whole, and the routers of all 896 experts.
    """
    layers = {n: LayerPlan(tuple(range(242))) for n in range(1, 93)}
    bits = dict.fromkeys(full.classes, 8)
    plan = ExpertPlan(896, 16, layers, bits=bits)
    routed = sum(full.routed_bytes_per_token(plan))
    assert routed / 1e9 == pytest.approx(25.8, abs=0.05)
    others = full.bytes_per_token(plan) - routed
    assert others / 1e9 == pytest.approx(58.8, abs=0.05)
    others += full.classes[EMBEDDING][8] + 92 * (896 - 242) * full.router_bytes
    assert others / 1e9 == pytest.approx(60.8, abs=0.1)


def test_frequency_decides_which_bank_is_read(tiny: SourceSizes):
    """Against a loop over the choices, those of dropped experts left out."""
    plan = random_plan(tiny, 3)
    rng = np.random.default_rng(0)
    frequency = {n: rng.integers(0, 9, 16) for n in plan.layers}
    low = StoredFormat("affine", plan.low_bits, 64)
    wanted = np.zeros(2)
    for layer, each in plan.layers.items():
        chosen = [e for e in each.order for _ in range(frequency[layer][e])]
        reads = np.zeros(2)
        for expert in chosen:
            bank, stored = (0, HIGH) if expert in each.high else (1, low)
            reads[bank] += tiny.expert_bytes(stored) - tiny.router_bytes
        wanted += 4 * reads / len(chosen)
    assert tiny.routed_bytes_per_token(plan, frequency) == pytest.approx(wanted)
    even = tiny.routed_bytes_per_token(plan)
    assert even != pytest.approx(wanted)
    others = tiny.bytes_per_token(plan) - sum(even)
    changed = tiny.bytes_per_token(plan, frequency) - wanted.sum()
    assert changed == pytest.approx(others, abs=1)
    never = {n: np.zeros(16, int) for n in plan.layers}
    assert tiny.routed_bytes_per_token(plan, never) == even


def test_a_token_reads_one_row_of_the_embedding(tiny: SourceSizes):
    plan = ExpertPlan.identity(tiny.args.text_config)
    tied = SourceSizes.of(wide_config(tie_word_embeddings=True))
    text, whole = tiny.args.text_config, tiny.classes[EMBEDDING][16]
    head = tiny.classes["lm_head"][16]
    assert "lm_head" not in tied.classes
    change = tied.bytes_per_token(plan) - tiny.bytes_per_token(plan)
    assert change == whole - head - whole // text.vocab_size
