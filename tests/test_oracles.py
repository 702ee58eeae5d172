"""The float64 oracles against Moonshot's own outputs, and against hand figures."""

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, relative_error, to_numpy
from golden_data import DATA, Case
from oracle_kda import log_decay, short_convolution
from oracle_model import Oracle, float64_weights
from oracle_moe import drop_weak_groups, route
from oracle_mxfp4 import affine, e8m0, mxfp4
from oracles import l2_normalise, situ

#: Float32 rounding of one layer, and what the whole miniature makes of it.
ONE_LAYER = 5e-6
WHOLE_MODEL = 7e-5

KDA_INSIDES = ("q", "k", "v", "g_raw", "beta_raw", "g_log", "o")


def oracle_of(case: Case) -> Oracle:
    return Oracle(float64_weights(case.stored), case.text_config)


def as_float64(tensors: dict[str, mx.array]) -> dict[str, np.ndarray]:
    """Floats as float64, integers as they are."""
    arrays = {name: to_numpy(tensor) for name, tensor in tensors.items()}
    return {
        name: a.astype(np.float64) if a.dtype == np.float32 else a
        for name, a in arrays.items()
    }


def compare_trace(trace: dict, want: dict, row: int, where: str) -> int:
    """Compare everything of ``row`` that a golden file holds; how many tensors."""
    compared = 0
    for name, value in want.items():
        base = name.removesuffix("_sub")
        if name in ("input_ids", "sub_idx") or name.endswith("router_gap"):
            continue
        got, expected = trace[base], value[row]
        if name.endswith("_sub"):
            got = got[want["sub_idx"]]
        if name.endswith("topk_idx"):
            assert (got == expected).all(), f"{where} {name}: other experts"
        else:
            assert_close(got, expected, rel=WHOLE_MODEL, where=f"{where} {name}")
        compared += 1
    return compared


def test_whole_model_gives_the_golden_trace(golden: Case) -> None:
    oracle = oracle_of(golden)
    want = as_float64(golden.expected("golden_text"))
    for row, ids in enumerate(want["input_ids"]):
        _, trace = oracle(ids)
        count = compare_trace(trace, want, row, f"{golden.name} row {row}")
        assert count > 8 * len(oracle.layers)


def layer_errors(oracle: Oracle, want: dict) -> dict[str, float]:
    """Largest error of each part when every layer is given its golden input."""
    errors: dict[str, float] = {}

    def note(part: str, got: np.ndarray, expected: np.ndarray) -> None:
        errors[part] = max(errors.get(part, 0.0), relative_error(got, expected))

    for row in range(len(want["input_ids"])):
        for i, w in enumerate(oracle.layers):
            at = f"layers.{i}."
            x = oracle.norm(want[at + "attn_in"][row], w["input_layernorm.weight"])
            y, _, insides = oracle.attend(i, x)
            kind = "kda" if oracle.is_kda(i) else "mla"
            note(kind, y, want[at + "attn_out"][row])
            for name, value in insides.items():
                if at + name in want:
                    note(name, value, want[at + name][row])
            x = want[at + "mlp_in"][row]
            x = oracle.norm(x, w["post_attention_layernorm.weight"])
            y, routing = oracle.feed(i, x)
            note("moe" if routing else "dense", y, want[at + "mlp_out"][row])
            if routing:
                chosen = want[at + "topk_idx"][row]
                assert (routing["topk_idx"] == chosen).all(), f"{at}: other experts"
                share = want[at + "topk_weight"][row]
                note("router", routing["topk_weight"], share)
    return errors


def test_each_layer_alone_gives_the_golden_output(golden: Case) -> None:
    oracle = oracle_of(golden)
    want = as_float64(golden.expected("golden_text"))
    if "layers.0.attn_in" not in want:  # the long case keeps no layer inputs
        _, trace = oracle(want["input_ids"][0])
        compare_trace(trace, want, 0, golden.name)
        return
    errors = layer_errors(oracle, want)
    assert {f"kda.{name}" for name in KDA_INSIDES} < set(errors)
    assert {"kda", "mla", "moe", "dense", "router", "kv_latent"} < set(errors)
    wrong = {part: f"{e:.1e}" for part, e in errors.items() if e > ONE_LAYER}
    assert not wrong, f"{golden.name}: {wrong}"


def compare_states(oracle: Oracle, states: list, want: dict, at: str, row: int) -> None:
    for i, state in enumerate(states):
        if not oracle.is_kda(i):
            continue
        here = f"{at}layers.{i}."
        recurrent = want[here + "recurrent_state"][row].swapaxes(-1, -2)
        assert_close(state.recurrent, recurrent, rel=WHOLE_MODEL, where=here)
        for name, tail in zip("qkv", state.conv, strict=True):
            stored = want[here + f"conv_state_{name}"][row][:, 1:].T
            assert_close(tail, stored, rel=WHOLE_MODEL, where=f"{here}{name}")


def check_cached_run(
    oracle: Oracle, want: dict, row: int, ids: np.ndarray, prefill: int, at: str = ""
) -> None:
    states = [None] * len(oracle.layers)
    logits, _ = oracle(ids[:prefill], states)
    first = want[at + "prefill_logits"][row]
    assert_close(logits[-1], first, rel=WHOLE_MODEL, where=f"{at}prefill")
    compare_states(oracle, states, want, at, row)
    steps = [oracle(ids[t : t + 1], states)[0][0] for t in range(prefill, len(ids))]
    stepped = want[at + "step_logits"][row]
    assert_close(np.array(steps), stepped, rel=WHOLE_MODEL, where=f"{at}steps")
    compare_states(oracle, states, want, f"{at}final.", row)


def test_cached_run_gives_the_golden_states(golden: Case) -> None:
    oracle = oracle_of(golden)
    want = as_float64(golden.expected("golden_cache"))
    prefill = int(want["prefill_len"][0])
    for row, ids in enumerate(want["input_ids"]):
        check_cached_run(oracle, want, row, ids, prefill)


def test_a_padded_row_is_the_row_alone(padded_golden: Case) -> None:
    oracle = oracle_of(padded_golden)
    want = as_float64(padded_golden.expected("golden_leftpad"))
    for row, ids in enumerate(want["input_ids"]):
        real = want["attention_mask"][row] == 1
        logits, trace = oracle(ids[real])
        assert_close(logits, want["logits"][row][real], rel=WHOLE_MODEL, where="full")
        for i in range(len(oracle.layers)):
            name = f"layers.{i}.out"
            out = want[name][row][real]
            assert_close(trace[name], out, rel=WHOLE_MODEL, where=name)
        prefill = int(want["cached.prefill_len"][0]) - int((~real).sum())
        check_cached_run(oracle, want, row, ids[real], prefill, "cached.")


def reverse(name: str, axis: int):
    """A mistake: the tensors whose names end in ``name``, reversed along ``axis``."""

    def mistake(weights: dict, config: dict) -> None:
        for key in [key for key in weights if key.endswith(name)]:
            weights[key] = np.flip(weights[key], axis)

    return mistake


def swap_nibbles(weights: dict, config: dict) -> None:
    for key in [key for key in weights if key.endswith("weight_packed")]:
        weights[key] = (weights[key] >> 4) | (weights[key] << 4)


def swap_gate_and_up(weights: dict, config: dict) -> None:
    for key in [key for key in weights if ".w1." in key]:
        other = key.replace(".w1.", ".w3.")
        weights[key], weights[other] = weights[other], weights[key]


def other(key: str, value: float | None):
    """A mistake in ``text_config`` or its ``linear_attn_config``."""

    def mistake(weights: dict, config: dict) -> None:
        place = config if key in config else config["linear_attn_config"]
        place[key] = value

    return mistake


MISTAKES = {
    "A_log in another order": (reverse("A_log", 0), "kda"),
    "dt_bias per head": (reverse("dt_bias", 0), "kda"),
    "convolution backwards": (reverse("_conv1d.weight", -1), "kda"),
    "softplus gate": (other("gate_lower_bound", None), "kda"),
    "output norm epsilon": (other("rms_norm_eps", 1e-6), "kda"),
    "high nibble first": (swap_nibbles, "moe"),
    "w1 and w3 swapped": (swap_gate_and_up, "moe"),
    "no linear cap": (other("activation_situ_linear_beta", None), "moe"),
    "another scale": (other("routed_scaling_factor", 2.0), "router"),
    "latents unnormed": (reverse("kv_a_layernorm.weight", 0), "mla"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_shows(mistake: str) -> None:
    """Broken twin: every mistake is far outside the tolerance of one layer, in F."""
    golden = Case(DATA / "golden" / "F")
    weights = float64_weights(golden.stored)
    config = dict(golden.text_config)
    config["linear_attn_config"] = dict(config["linear_attn_config"])
    break_it, part = MISTAKES[mistake]
    break_it(weights, config)
    want = as_float64(golden.expected("golden_text"))
    assert layer_errors(Oracle(weights, config), want)[part] > 20 * ONE_LAYER


def test_mxfp4_by_hand() -> None:
    packed = np.array([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]] * 2, np.uint8)
    packed = np.concatenate([packed, packed], axis=1)  # 32 values: one group
    values = mxfp4(packed, np.array([[127], [129]], np.uint8))
    row = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert values[0].tolist() == row * 2
    assert values[1].tolist() == [4 * v for v in row] * 2
    assert e8m0(np.array([0, 127, 254], np.uint8)).tolist() == [
        2.0**-127,
        1.0,
        2.0**127,
    ]
    assert np.isnan(e8m0(np.array([255], np.uint8))).all()


def test_mxfp4_is_what_mlx_reads() -> None:
    rng = np.random.default_rng(0)
    packed = rng.integers(0, 256, (5, 48), np.uint8)
    scale = rng.integers(100, 140, (5, 3), np.uint8)
    got = mx.dequantize(
        mx.array(packed).view(mx.uint32),
        mx.array(scale),
        group_size=32,
        bits=4,
        mode="mxfp4",
        dtype=mx.float32,
    )
    assert (to_numpy(got) == mxfp4(packed, scale)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_affine_is_what_mlx_reads(bits: int) -> None:
    w = mx.random.normal((3, 128), key=mx.random.key(bits))
    words, scales, biases = mx.quantize(w, group_size=32, bits=bits)
    want = mx.dequantize(words, scales, biases, group_size=32, bits=bits)
    got = affine(to_numpy(words), to_numpy(scales), to_numpy(biases), bits)
    assert_close(got, want, rel=1e-7, where=f"{bits} bits")


def test_gate_by_hand() -> None:
    """Three points of x = -8..8 with A = e^0.5, dt = 1, bound -5, and softplus."""
    raw = np.array([-8.0, 0.0, 8.0]).reshape(3, 1, 1)
    a_log, dt = np.array([0.5, 9.0]), np.array([1.0])
    sigmoid_form = log_decay(raw, a_log, dt, -5.0).reshape(-1)
    want = [-4.86129450e-05, -4.19359076, -4.99999820]
    np.testing.assert_allclose(sigmoid_form, want, rtol=2e-8)
    softplus_form = log_decay(raw, a_log, dt, None).reshape(-1)
    np.testing.assert_allclose(
        softplus_form, [-1.50275413e-3, -2.16520248, -14.8386949], 2e-6
    )


def test_small_functions_by_hand() -> None:
    assert l2_normalise(np.array([3e-3, 4e-3])).tolist() == pytest.approx(
        [3e-3 / np.sqrt(26e-6), 4e-3 / np.sqrt(26e-6)]
    )
    gate, up = np.array([2.0]), np.array([30.0])
    want = 4 * np.tanh(0.5) / (1 + np.exp(-2.0)) * 25 * np.tanh(1.2)
    assert situ(gate, up, 4.0, 25.0)[0] == pytest.approx(want)
    y, tail = short_convolution(
        np.array([[1.0], [2.0]]), np.array([[1, 10, 100, 1000.0]]), np.ones((3, 1))
    )
    assert y.reshape(-1).tolist() == [1111.0, 2111.0]
    assert tail.reshape(-1).tolist() == [1.0, 1.0, 2.0]


def test_weak_groups_are_dropped() -> None:
    """Two groups of three: the second wins by its two best, not by its best one."""
    config = {"num_expert_group": 2, "topk_group": 1, "num_experts_per_token": 2}
    biased = np.array([[0.9, 0.1, 0.1, 0.6, 0.6, 0.1]])
    kept = drop_weak_groups(biased, config)
    assert np.isneginf(kept[0, :3]).all()
    assert kept[0, 3:].tolist() == [0.6, 0.6, 0.1]
    scores = np.log(biased / (1 - biased))
    chosen, shares, _ = route(np.ones((1, 1)), scores.T, np.zeros(6), config)
    assert chosen.tolist() == [[3, 4]]
    np.testing.assert_allclose(shares, [[0.5, 0.5]])
