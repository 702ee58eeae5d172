"""Two banks against one, in every form; what MLX's matmuls are handed (B32)."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from closeness import assert_close, relative_error, to_numpy
from expert_layers import (
    EXPERTS,
    PROJECTIONS,
    WIDTH,
    WIDTHS,
    problem,
    quantize,
    text_args,
    truth,
    two_banks,
)
from mlx_lm.tuner.lora import LoRASwitchLinear

from kimi_k3.models import TwoBankSwitchGLU, routed_pairs
from kimi_k3.models.expert_banks import ExpertBank, RoutedExperts

#: Float32 against float64.
EXACT = 1e-5


def forms() -> dict[str, Callable[[RoutedExperts, mx.array, mx.array], mx.array]]:
    return {
        "gathered": routed_pairs.run_gathered,
        "sorted": routed_pairs.run_sorted,
        "partitioned": lambda experts, x, ids: routed_pairs.run_partitioned(
            list(experts.banks()), x, ids
        ),
        "called": lambda experts, x, ids: experts(x, ids),
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("split", [0, 1, 5, 11, 12])
@pytest.mark.parametrize("tokens", [1, 33])
def test_every_form_is_the_oracle(form: str, split: int, tokens: int) -> None:
    experts = two_banks(split)
    x, ids, _ = problem(tokens)
    got = forms()[form](experts, x, ids)
    assert_close(got, truth(experts, x, ids), rel=EXACT, where=form)
    # Broken twin: every id one further.
    moved = forms()[form](experts, x, (ids + 1) % EXPERTS)
    assert relative_error(moved, truth(experts, x, ids)) > 100 * EXACT


@pytest.mark.parametrize("high", WIDTHS)
@pytest.mark.parametrize("tokens", [2, 65])
def test_every_width(high: str, tokens: int) -> None:
    experts = two_banks(5, high, "affine2" if high != "affine2" else "dense")
    x, ids, weights = problem(tokens)
    want = (truth(experts, x, ids) * to_numpy(weights)[..., None]).sum(axis=-2)
    got = experts.combine(x, ids, weights)
    assert_close(got, want, rel=EXACT, where="combined", dtype=mx.float32)
    rounded = experts.combine(x.astype(mx.bfloat16), ids, weights)
    assert_close(rounded, want, rel=2e-2, where="bfloat16", dtype=mx.bfloat16)


def one_bank(experts: TwoBankSwitchGLU) -> ExpertBank:
    """The experts of two banks of one width in a single bank."""
    bank = ExpertBank(text_args(), EXPERTS)
    quantize(bank, "mxfp4")
    for name in PROJECTIONS:
        for part in ("weight", "scales"):
            halves = [experts.bank_hi[name][part], experts.bank_lo[name][part]]
            bank[name][part] = mx.concatenate(halves)
    return bank.eval()  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("tokens", [1, 33])
def test_one_bank_is_two_of_the_same_weights(tokens: int) -> None:
    experts = two_banks(5, "mxfp4", "mxfp4")
    x, ids, weights = problem(tokens)
    want = one_bank(experts).combine(x, ids, weights)
    assert_close(experts.combine(x, ids, weights), want, rel=1e-6)


@pytest.fixture
def on_the_cpu() -> Iterator[None]:
    """The rules of the CPU, also on a Mac."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


class Recorder:
    """Notes the shapes of every expert matmul while it runs."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.reads = 0

    def wrap(self, run: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def call(x: mx.array, weight: mx.array, *rest: Any, **more: Any) -> mx.array:
            arrays = {"x": x, "weight": weight, "ids": more["rhs_indices"]}
            mx.eval(arrays)
            strides = {k: np.array(a, copy=False).strides for k, a in arrays.items()}
            row_major = all(
                strides[k] == np.empty(a.shape, np.array(a, copy=False).dtype).strides
                for k, a in arrays.items()
            )
            self.calls.append(
                {
                    "rows": more["rhs_indices"].size,
                    "contiguous": row_major,
                    "sorted": more.get("sorted_indices", False),
                    "ids": to_numpy(arrays["ids"]).reshape(-1),
                }
            )
            return run(x, weight, *rest, **more)

        return call


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    with (
        mock.patch.object(mx, "gather_qmm", recorder.wrap(mx.gather_qmm)),
        mock.patch.object(mx, "gather_mm", recorder.wrap(mx.gather_mm)),
    ):
        yield recorder


@pytest.mark.parametrize("pairs", [1, 63, 64, 65, 1025])
@pytest.mark.parametrize("form", ["sorted", "partitioned"])
def test_sorted_matmuls_get_contiguous_rows_in_order(
    recorder: Recorder, pairs: int, form: str
) -> None:
    """B32: views as inputs, and what reaches MLX has no views left."""
    experts = two_banks(5)
    x, ids, _ = problem(2 * pairs, 1)
    x, ids = x[:, ::2], ids[:, ::2]
    got = forms()[form](experts, x, ids)
    assert recorder.calls
    for call in recorder.calls:
        if form == "partitioned" and pairs == 1:
            assert not call["sorted"]  # a token's pairs share one row
            continue
        assert call["sorted"]
        assert call["contiguous"]
        assert (np.diff(call["ids"].astype(np.int64)) >= 0).all()
    copies = mx.contiguous(x), mx.contiguous(ids)
    assert relative_error(got, forms()["gathered"](experts, *copies)) < 1e-6
    assert not recorder.calls[-1]["sorted"]


def test_a_view_is_noticed(recorder: Recorder) -> None:
    """The test of the test: a strided input, handed on as it is."""
    x = mx.random.normal((6, 1, WIDTH))[::2]
    two_banks(5).bank_hi.run_pairs(x, mx.array([0, 1, 2]), True)
    assert [call["contiguous"] for call in recorder.calls] == [False, False, True]


@pytest.mark.parametrize("form", ["sorted", "partitioned"])
@pytest.mark.parametrize("rows", [64, 65, 128, 129, 500])
def test_no_matmul_has_more_rows_than_are_safe(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, form: str, rows: int
) -> None:
    """B32 and mlx#3856, with 64 in place of 32,768 so that it is quick to see."""
    experts = two_banks(5)
    x, ids, _ = problem(rows, 1)
    want = forms()["gathered"](experts, x, ids)
    recorder.calls.clear()
    monkeypatch.setattr(routed_pairs, "MOST_ROWS", 64)
    got = forms()[form](experts, x, ids)
    assert max(call["rows"] for call in recorder.calls) <= 64
    ran = sum(call["rows"] for call in recorder.calls)
    banks_of_a_pair = 2 if form == "sorted" else 1
    assert ran == 3 * rows * banks_of_a_pair
    assert_close(got, want, rel=1e-6, where=form)


def test_the_safe_limit_is_mlxs() -> None:
    assert routed_pairs.MOST_ROWS <= 32768


def partitioned_calls(recorder: Recorder, experts: RoutedExperts, tokens: int) -> int:
    """Rows that the projections of all banks ran, in a form made to partition."""
    recorder.calls.clear()
    with mock.patch.object(routed_pairs, "PARTITION_FROM_WEIGHTS", 0):
        mx.eval(experts.combine(*problem(tokens)))
    return sum(call["rows"] for call in recorder.calls)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("tokens", [1, 33])
def test_each_bank_runs_its_own_pairs_only(recorder: Recorder, tokens: int) -> None:
    assert partitioned_calls(recorder, two_banks(5), tokens) == 3 * 4 * tokens


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("split", [0, 5])
@pytest.mark.parametrize("tokens", [1, 33])
def test_slots_without_weight_are_not_run(
    recorder: Recorder, tokens: int, split: int
) -> None:
    """With ``expert_top_p``, whose slots left out have weight 0, in one bank too."""
    experts = two_banks(split, expert_top_p=0.9)
    used = int((problem(tokens)[2] != 0).sum())
    assert used < 4 * tokens
    assert partitioned_calls(recorder, experts, tokens) == 3 * used


@pytest.mark.usefixtures("on_the_cpu")
def test_no_slot_has_weight() -> None:
    experts = two_banks(5, expert_top_p=0.9)
    x, ids, weights = problem(33)
    assert not experts.combine(x, ids, 0 * weights).any()


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("tokens", [1, 33])
def test_training_reads_nothing_and_has_gradients(tokens: int) -> None:
    experts = two_banks(5, "dense", "dense")
    experts.train()
    x, ids, weights = problem(tokens)

    mx.eval(experts.parameters(), x, ids, weights)

    def loss(x: mx.array, ids: mx.array, weights: mx.array) -> mx.array:
        return experts.combine(x, ids, weights).square().sum()

    gradient = mx.grad(loss)
    with mock.patch.object(routed_pairs, "PARTITION_FROM_WEIGHTS", 0):
        compiled = mx.compile(gradient)(x, ids, weights)
        experts.eval()
        plain = gradient(x, ids, weights)
        assert_close(compiled, plain, rel=EXACT, where="gradient")
        # Broken twin: the form that reads cannot be traced.
        with pytest.raises(ValueError, match="transformation"):
            mx.compile(loss)(x, ids, weights)


@pytest.mark.usefixtures("on_the_cpu")
def test_an_adapter_is_called(recorder: Recorder) -> None:
    """LoRA around a bank's projection changes the result as it does alone."""
    experts = two_banks(5)
    x, ids, weights = problem(33)
    before = experts.combine(x, ids, weights)
    mx.random.seed(2)
    for bank in (experts.bank_hi, experts.bank_lo):
        wrapped: Any = LoRASwitchLinear.from_base(bank.down_proj, r=4)
        wrapped.lora_b = mx.random.normal(wrapped.lora_b.shape) * 0.1
        bank.down_proj = wrapped
    experts.eval()
    after = experts.combine(x, ids, weights)
    assert relative_error(after, before) > 0.01
    routed = routed_pairs.run_gathered(experts, x, ids)
    want = (routed * weights[..., None]).sum(axis=-2)
    assert_close(after, want, rel=EXACT)


def prefill_on_a_gpu(experts: RoutedExperts, tokens: int) -> tuple[int, mx.array]:
    """Arrays read by the host, and the result, by the rules for a GPU."""
    reads, tolist = [], routed_pairs.read_cuts

    def read(below: mx.array) -> list[int]:
        reads.append(below.size)
        return tolist(below)

    with (
        mock.patch.object(routed_pairs, "runs_on_cpu", return_value=False),
        mock.patch.object(routed_pairs, "read_cuts", read),
    ):
        out = experts.combine(*problem(tokens))
    return len(reads), out


@pytest.mark.usefixtures("on_the_cpu")
def test_a_gpu_reads_once_a_layer_and_chunk_and_never_in_decode() -> None:
    """From four pairs an expert on; below, as in decode, nothing is read."""
    two, few = two_banks(5), EXPERTS - 1
    one: nn.Module = two.bank_lo
    assert isinstance(one, ExpertBank)
    for tokens, wanted in ((1, 0), (few, 0), (EXPERTS, 1), (100, 1)):
        reads, got = prefill_on_a_gpu(two, tokens)
        assert reads == wanted, f"{tokens} tokens"
        assert_close(got, two.combine(*problem(tokens)), rel=1e-6)
    assert prefill_on_a_gpu(one, 3)[0] == 0


KERNELS = ["kimi_k3_expert_gate_up", "kimi_k3_expert_down_combine"]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("split", [0, 5, 12])
def test_few_pairs_are_two_launches(
    simulated_kernels: Callable[..., Any], split: int, dtype: mx.Dtype
) -> None:
    """One bank or two; no other form has a part in it."""
    experts = two_banks(split)
    for tokens in (1, EXPERTS - 1):
        x, ids, weights = problem(tokens)
        want = (truth(experts, x, ids) * to_numpy(weights)[..., None]).sum(axis=-2)
        with (
            simulated_kernels() as launches,
            mock.patch.object(RoutedExperts, "_run", side_effect=AssertionError),
        ):
            got = experts.combine(x.astype(dtype), ids, weights)
        assert [launch.name for launch in launches.records] == KERNELS
        rel = EXACT if dtype == mx.float32 else 2e-2
        assert_close(got, want, rel=rel, where=f"{tokens} tokens", dtype=dtype)


def test_who_does_not_launch(simulated_kernels: Callable[..., Any]) -> None:
    """Prefill, training and adapters take MLX's matmuls."""

    def launches_of(experts: RoutedExperts, tokens: int) -> int:
        given = problem(tokens)
        with simulated_kernels() as launches:
            got = experts.combine(*given)
        want = truth(experts, given[0], given[1]) * to_numpy(given[2])[..., None]
        assert_close(got, want.sum(axis=-2), rel=EXACT)
        return len(launches.records)

    experts = two_banks(5)
    assert launches_of(experts, 1) == 2
    assert launches_of(experts, EXPERTS) == 0
    experts.train()
    assert launches_of(experts, 1) == 0
    experts = two_banks(5)
    wrapped: Any = LoRASwitchLinear.from_base(experts.bank_lo.up_proj, r=4)
    experts.bank_lo.up_proj = wrapped
    experts.eval()
    given = problem(1)
    with simulated_kernels() as launches:
        mx.eval(experts.combine(*given))
    assert not launches.records
