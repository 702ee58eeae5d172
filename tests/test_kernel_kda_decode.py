"""The kernel of a KDA layer's decode step against its reference and float64."""

from typing import Any

import mlx.core as mx
import numpy as np
import oracle_kda
import pytest
from closeness import assert_close, relative_error
from oracle_pair import float64
from oracles import l2_normalise, rms_norm, sigmoid
from simulated import same_in_every_order, under_sanitizers

from kimi_k3.kernels import kda_decode as module
from kimi_k3.kernels.kda_decode import kda_decode, kda_decode_reference

NAME = "kimi_k3_kda_decode"
EXACT = 5e-6
OUTPUTS = ("output", "conv state", "state")


def case(
    tokens: int,
    heads: int = 3,
    K: int = 32,
    rows: int = 1,
    width: int = 4,
    **changes: Any,
) -> dict[str, Any]:
    """Random inputs; no two channels have one dt_bias, no two heads one A_log."""
    rng = np.random.default_rng(1000 * tokens + 100 * heads + K + width)
    channels = heads * K

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, np.float32))

    return {
        "qkv": normal(rows, tokens, 3 * channels),
        "gate": normal(rows, tokens, channels),
        "beta": normal(rows, tokens, heads),
        "output_gate": normal(rows, tokens, channels),
        "conv_state": normal(rows, width - 1, 3 * channels),
        "state": normal(rows, heads, K, K),
        "conv_weight": 0.5 * normal(3 * channels, width, 1),
        "A_log": normal(heads),
        "dt_bias": mx.array(rng.permutation(np.linspace(-3, 3, channels)), mx.float32),
        "norm_weight": 1 + 0.3 * normal(K),
        "lower_bound": -5.0,
        "norm_eps": 1e-5,
        **changes,
    }


def truth_of_row(given: dict[str, Any], row: int) -> tuple[np.ndarray, ...]:
    x = {n: float64(v) for n, v in given.items() if isinstance(v, mx.array)}
    heads, size = len(x["A_log"]), x["state"].shape[-1]
    tokens = x["qkv"].shape[1]
    mixed, tail = oracle_kda.short_convolution(
        x["qkv"][row], x["conv_weight"][..., 0], x["conv_state"][row]
    )
    q, k, v = mixed.reshape(tokens, 3, heads, size).swapaxes(0, 1)

    def per_head(name: str) -> np.ndarray:
        return x[name][row].reshape(tokens, heads, size)

    decay = oracle_kda.log_decay(
        per_head("gate"), x["A_log"], x["dt_bias"], given["lower_bound"]
    )
    out, state = oracle_kda.delta_rule(
        l2_normalise(q) * size**-0.5,
        l2_normalise(k),
        v,
        np.exp(decay),
        sigmoid(x["beta"][row]),
        x["state"][row].swapaxes(-1, -2),
    )
    out = rms_norm(out, x["norm_weight"], given["norm_eps"])
    out = out * sigmoid(per_head("output_gate"))
    return out.reshape(tokens, -1), tail, state.swapaxes(-1, -2)


def truth(given: dict[str, Any]) -> list[np.ndarray]:
    """Output, conv state and state, float64."""
    rows = [truth_of_row(given, row) for row in range(len(given["qkv"]))]
    return [np.stack(arrays) for arrays in zip(*rows, strict=True)]


def decoded(given: dict[str, Any], kernels: Any) -> tuple[mx.array, ...]:
    with kernels() as launches:
        got = kda_decode(**given)
        mx.eval(got)
    assert launches.count(NAME) == 1
    return got


def check(given: dict[str, Any], kernels: Any) -> tuple[mx.array, ...]:
    got = decoded(given, kernels)
    wants, references = truth(given), kda_decode_reference(**given)
    for name, one, want, reference in zip(OUTPUTS, got, wants, references, strict=True):
        assert_close(one, want, rel=EXACT, where=name, dtype=reference.dtype)
        assert_close(one, reference, rel=EXACT, where=f"{name}: reference")
    return got


@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize("bound", [-5.0, None], ids=["bound", "softplus"])
def test_a_few_tokens(simulated_kernels: Any, tokens: int, bound: float | None) -> None:
    check(case(tokens, rows=2, lower_bound=bound), simulated_kernels)


@pytest.mark.parametrize(
    ("tokens", "heads", "K"), [(4, 1, 64), (1, 2, 96), (7, 5, 128)]
)
def test_any_head(simulated_kernels: Any, tokens: int, heads: int, K: int) -> None:
    check(case(tokens, heads, K), simulated_kernels)


@pytest.mark.parametrize("width", [2, 3, 6])
def test_any_convolution(simulated_kernels: Any, width: int) -> None:
    check(case(2, width=width), simulated_kernels)


def test_gates_at_their_ends(simulated_kernels: Any) -> None:
    """Neither overflow nor a lost decay where exp would leave float32."""
    for bound in (-5.0, None):
        given = case(2, lower_bound=bound)
        sign = mx.where(mx.arange(given["gate"].shape[-1]) % 2 == 0, 100.0, -100.0)
        given["gate"] = given["gate"] + sign
        given["qkv"] = 100 * given["qkv"]
        given["beta"] = given["beta"] * 200
        check(given, simulated_kernels)


def test_every_state(simulated_kernels: Any) -> None:
    """The states after token t are those of a call with the tokens up to t."""
    given = case(3, rows=2)
    out, convs, states = decoded({**given, "every_state": True}, simulated_kernels)
    wanted = kda_decode_reference(**given, every_state=True)
    for name, one, want in zip(OUTPUTS, (out, convs, states), wanted, strict=True):
        assert_close(one, want, rel=EXACT, where=f"{name}: reference")
    for t in range(3):
        names = ("qkv", "gate", "beta", "output_gate")
        upto = {name: given[name][:, : t + 1] for name in names}
        _, conv, state = decoded({**given, **upto}, simulated_kernels)
        assert_close(convs[:, t], conv, rel=1e-7, where=f"conv state {t}")
        assert_close(states[:, t], state, rel=1e-6, where=f"state {t}")


def test_token_by_token_is_a_block(simulated_kernels: Any) -> None:
    given = case(6)
    want, conv_want, state_want = check(given, simulated_kernels)
    conv, state, outs = given["conv_state"], given["state"], []
    for t in range(6):
        names = ("qkv", "gate", "beta", "output_gate")
        token = {name: given[name][:, t : t + 1] for name in names}
        now = {**given, **token, "conv_state": conv, "state": state}
        out, conv, state = decoded(now, simulated_kernels)
        outs.append(out)
    assert_close(mx.concatenate(outs, axis=1), want, rel=1e-6, where="output")
    assert_close(conv, conv_want, rel=1e-7, where="conv state")
    assert_close(state, state_want, rel=1e-6, where="state")


def in_bfloat16(given: dict[str, Any]) -> dict[str, Any]:
    names = ("qkv", "gate", "beta", "output_gate", "conv_state")
    return {**given, **{name: given[name].astype(mx.bfloat16) for name in names}}


def test_bfloat16_activations(simulated_kernels: Any) -> None:
    """The roundings of the reference, at the same places."""
    given = in_bfloat16(case(4))
    got = decoded(given, simulated_kernels)
    for name, one, want in zip(
        OUTPUTS, got, kda_decode_reference(**given), strict=True
    ):
        rel = EXACT if name != "output" else 2**-8
        assert_close(one, want, rel=rel, where=name, dtype=want.dtype)


def test_real_shape(simulated_kernels: Any) -> None:
    """96 heads of 128; in float32 against float64, and as a build runs it."""
    given = module.example(np.random.default_rng(0))
    got = decoded(given, simulated_kernels)
    for name, one, want in zip(
        OUTPUTS, got, kda_decode_reference(**given), strict=True
    ):
        assert_close(one, want, rel=2**-8, where=name, dtype=want.dtype)
    exact = {
        name: x.astype(mx.float32) if isinstance(x, mx.array) else x
        for name, x in given.items()
    }
    check(exact, simulated_kernels)


@pytest.mark.usefixtures("simulated_kernels")
@pytest.mark.parametrize("every", [False, True])
def test_thread_order_and_garbage_do_not_matter(every: bool) -> None:
    given = case(3, heads=2, K=64)
    same_in_every_order(lambda: kda_decode(**given, every_state=every))


@pytest.mark.usefixtures("simulated_kernels")
def test_sanitizers_find_nothing() -> None:
    given = case(2, heads=1)
    under_sanitizers(lambda: kda_decode(**given))


REFERENCE_RULES: dict[str, dict[str, Any]] = {
    "nine tokens": {"tokens": 9},
    "heads of 24": {"tokens": 1, "K": 24},
    "heads of 160": {"tokens": 1, "K": 160},
    "a conv state of another dtype": {"tokens": 1, "conv_dtype": mx.bfloat16},
    "training": {"tokens": 1, "training": True},
}


@pytest.mark.parametrize("rule", REFERENCE_RULES)
def test_the_rule_for_the_reference(simulated_kernels: Any, rule: str) -> None:
    changes = dict(REFERENCE_RULES[rule])
    dtype = changes.pop("conv_dtype", mx.float32)
    given = case(**changes)
    given["conv_state"] = given["conv_state"].astype(dtype)
    with simulated_kernels() as launches:
        mx.eval(kda_decode(**given))
    assert not launches.count(NAME)


@pytest.mark.parametrize("tokens", [1, 8, 63])
def test_cpu_path_with_all_different_dt_bias(tokens: int) -> None:
    """mlx-lm #1792, #1799: the gate's bias is per head and channel, on every device.

    `kimi-k3 doctor --kernels` compares a GPU with these ops at Kimi K3's shape.
    """
    given = case(tokens)
    bias = np.array(given["dt_bias"])
    assert len(np.unique(bias)) == bias.size
    wants = truth(given)
    for name, got, want in zip(OUTPUTS, kda_decode(**given), wants, strict=True):
        assert_close(got, want, rel=EXACT, where=name)
    for wrong in MISTAKES.values():
        broken = truth({**given, "dt_bias": wrong(given["dt_bias"], 32)})
        assert relative_error(broken[2], wants[2]) > 0.01


MISTAKES = {
    "dt_bias per head": lambda x, K: mx.repeat(x.reshape(-1, K)[:, 0], K),
    "dt_bias in another head": lambda x, K: mx.roll(x, K),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(simulated_kernels: Any, mistake: str) -> None:
    """Broken twin: what an mlx-lm kernel once read."""
    given = case(2)
    _, _, state = check(given, simulated_kernels)
    broken = {**given, "dt_bias": MISTAKES[mistake](given["dt_bias"], 32)}
    assert relative_error(state, truth(broken)[2]) > 0.01
