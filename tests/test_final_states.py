"""Final hidden states times the head = the logits of the whole model, on every build."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from closeness import assert_close, assert_same, relative_error
from evaluation_cases import samples_for, samples_of, with_tokenizer
from golden_data import Case as Folder
from loading import load_float32
from tiny_k3 import write_t1, write_t2

from kimi_k3.errors import EvaluationError, NotFiniteError
from kimi_k3.evaluation import head as head_module
from kimi_k3.evaluation.final_states import FinalStates
from kimi_k3.evaluation.head import Head
from kimi_k3.evaluation.states_run import Run

#: Against expected files, and against the same model in the same arithmetic.
EXPECTED, LOGITS = 3e-4, 1e-5


def states_of(folder: Path, tokens: np.ndarray, out: Path, **run: Any) -> FinalStates:
    documents = np.zeros_like(tokens)
    samples = samples_of(folder, tokens, documents)
    return Run.of(folder, samples, float32=True, **run).final_states(out)


def logits_of(states: FinalStates) -> np.ndarray:
    rows = range(states.samples.rows)
    return np.stack([np.array(states.head.logits(states.row(i))) for i in rows])


def test_logits_of_a_build(build: Folder, tmp_path: Path):
    """A build of the wild: plain, pruned, two banks, with a quantised head or not."""
    folder = with_tokenizer(build.folder, tmp_path / "build")
    expected = build.expected("expected_logits")
    tokens = np.array(expected["input_ids"])
    states = states_of(folder, tokens, tmp_path / "states")
    got = logits_of(states)
    assert_close(got, expected["logits"], rel=EXPECTED, where=build.name)
    whole = load_float32(build.folder)(expected["input_ids"])
    assert_close(got, whole, rel=LOGITS, where=build.name)
    quantised = "lm_head" in str(build.config.get("quantization", {}))
    assert bool(states.head.quantization) == quantised


def test_logits_of_a_source(golden: Folder, tmp_path: Path):
    """The release's format, against what Moonshot's code gives."""
    folder = with_tokenizer(golden.folder, tmp_path / "source")
    want = golden.expected("golden_text")
    states = states_of(folder, np.array(want["input_ids"]), tmp_path / "states")
    assert_close(logits_of(states), want["logits"], rel=EXPECTED, where=golden.name)
    final = mx.stack([states.row(i) for i in range(states.samples.rows)])
    assert_close(final, want["final_hidden"], rel=EXPECTED, where=golden.name)


@pytest.mark.parametrize("variant", ["tied", "two-bank"])
def test_logits_of_a_variant(variant: str, tmp_path: Path):
    folder = tmp_path / "source"
    if variant == "tied":
        write_t1(folder, tokenizer=True, tie_word_embeddings=True)
    else:
        write_t2(folder, tokenizer=True)
    samples = samples_for(folder, rows=3)
    states = Run.of(folder, samples, float32=True).final_states(tmp_path / "states")
    want = load_float32(folder)(mx.array(samples.tokens))
    got = logits_of(states)
    assert_close(got, want, rel=LOGITS, where=variant)
    other = replace(samples, tokens=samples.tokens[::-1].copy())
    run = Run.of(folder, other, float32=True)
    broken = logits_of(run.final_states(tmp_path / "other"))
    assert relative_error(broken, want) > 1e-2


def test_padding_and_what_lies_beside_a_row(tmp_path: Path):
    """States do not depend on padding, nor on how many rows go through together."""
    folder = write_t1(tmp_path / "source", tokenizer=True)
    samples = samples_for(folder, rows=5)
    alone = Run.of(folder, samples, float32=True).final_states(tmp_path / "1")
    for step in (2, 5, 99):
        run = Run.of(folder, samples, float32=True, rows_per_step=step)
        states = run.final_states(tmp_path / str(step))
        assert_close(logits_of(states), logits_of(alone), rel=1e-6, where=f"{step}")
    tokens = samples.tokens.copy()
    tokens[-1, -5:] = 77
    padded = replace(samples, tokens=tokens)
    again = Run.of(folder, padded, float32=True).final_states(tmp_path / "padded")
    assert_same(again.row(4)[:-5], alone.row(4)[:-5], where="before padding")


def test_memory_that_holds_nothing_changes_nothing(tmp_path: Path):
    folder = write_t1(tmp_path / "source", tokenizer=True)
    samples = samples_for(folder)
    for limit in (0, 1 << 40):
        run = Run.of(folder, samples, memory_limit=limit)
        run.final_states(tmp_path / str(limit))
    for name in ("final.bin", "head.safetensors", "samples.npz"):
        left, right = (tmp_path / str(n) / name for n in (0, 1 << 40))
        assert left.read_bytes() == right.read_bytes(), name


def test_the_stored_type_is_computed_in_unless_another_is_asked_for(tmp_path: Path):
    """The nano is stored in bfloat16, so are its states: two bytes a number."""
    from kimi_k3.nano import NANO_FOLDER

    samples = samples_for(NANO_FOLDER, rows=2)
    for float32, size in ((False, 2), (True, 4)):
        run = Run.of(NANO_FOLDER, samples, float32=float32)
        states = run.final_states(tmp_path / str(size))
        row = states.row(0)
        assert row.dtype == (mx.float32 if float32 else mx.bfloat16)
        final = tmp_path / str(size) / "final.bin"
        assert final.stat().st_size == samples.tokens.size * row.shape[-1] * size


WIDE = np.random.default_rng(0).standard_normal((300, 64)).astype(np.float32)


@pytest.mark.parametrize(
    "quantization",
    [
        {},
        {"bits": "8", "group_size": "64", "mode": "affine"},
        {"bits": "4", "group_size": "32", "mode": "affine"},
        {"bits": "4", "group_size": "32", "mode": "mxfp4"},
    ],
    ids=["plain", "affine-8", "affine-4", "mxfp4"],
)
@pytest.mark.parametrize("rows", [100, 128, 299, 1000])
def test_head_in_parts(
    quantization: dict[str, str],
    rows: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """However many rows are in float32 at once; against NumPy in float64."""
    weight = mx.array(WIDE)
    if quantization:
        bits, group = int(quantization["bits"]), int(quantization["group_size"])
        mode = quantization["mode"]
        parts = mx.quantize(weight, bits=bits, group_size=group, mode=mode)
        names = ("weight", "scales", "biases")
        arrays: dict[str, mx.array] = {}
        arrays.update(zip(names, parts, strict=False))
        weight = mx.dequantize(*parts, bits=bits, group_size=group, mode=mode)
    else:
        arrays = {"weight": weight}
    Head(arrays, quantization).save(tmp_path / "head.safetensors")
    monkeypatch.setattr(head_module, "_ROWS", rows)
    head = Head.load(tmp_path / "head.safetensors")
    assert head.vocab == 300
    hidden = np.random.default_rng(1).standard_normal((7, 64)).astype(np.float32)
    want = hidden.astype(np.float64) @ np.array(weight.astype(mx.float32)).T
    got = head.logits(mx.array(hidden))
    assert_close(got, want, rel=1e-6, dtype=mx.float32)


def test_a_head_that_is_none(tmp_path: Path):
    with pytest.raises(EvaluationError, match="parameters none"):
        Head({}, {})
    with pytest.raises(EvaluationError, match="parameters weight, lora"):
        Head({"weight": mx.zeros((2, 2)), "lora": mx.zeros((2, 2))}, {})
    for value in (mx.nan, mx.inf):
        weight = mx.array([[0, 1, value]])
        with pytest.raises(NotFiniteError, match="the head: weight holds NaN"):
            Head({"weight": weight}, {})
    with pytest.raises(EvaluationError, match=r"head\.safetensors cannot be written"):
        Head({"weight": mx.zeros((2, 2))}, {}).save(
            tmp_path / "no" / "head.safetensors"
        )
    (tmp_path / "head.safetensors").write_bytes(b"no head")
    with pytest.raises(EvaluationError, match=r"head\.safetensors cannot be read"):
        Head.load(tmp_path / "head.safetensors")
