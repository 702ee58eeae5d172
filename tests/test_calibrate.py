"""A whole calibration against float64, on every kind of checkpoint."""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibration_cases import CORPORA, results, samples_for, samples_of, write_source
from closeness import assert_close, assert_same, relative_error
from golden_data import Case
from oracle_calibration import Truth, record_model
from oracle_model import Oracle, float64_weights
from tiny_k3 import write_t2

from kimi_k3.build import calibrate as module
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.input_moments import LayerMoments
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.pass_progress import Progress
from kimi_k3.build.samples import Samples

REL = 1e-5


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1")


@pytest.fixture(scope="module")
def samples(source: Path) -> Samples:
    return samples_for(source)


@pytest.fixture(scope="module")
def truths(source: Path, samples: Samples) -> list[Truth]:
    case = Case(source)
    oracle = Oracle(float64_weights(case.stored), case.text_config)
    found = record_model(oracle, samples.tokens, samples.labels, len(CORPORA))
    assert min(truth.gap for truth in found) > 1e-5, "a tie: choose another seed"
    return found


@pytest.fixture
def float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute in float32, so that nothing but the sums' own error is left."""
    stream = partial(LayerStream, dtype=mx.float32)
    monkeypatch.setattr(module, "LayerStream", stream)


@pytest.mark.usefixtures("float32")
@pytest.mark.parametrize(
    "settings",
    [{"step_tokens": 2048}, {"step_tokens": 12, "memory_limit": 0}],
    ids=["at-once", "row-by-row-from-disk"],
)
def test_every_sum_is_the_oracle(
    source: Path,
    samples: Samples,
    truths: list[Truth],
    settings: dict[str, Any],
    tmp_path: Path,
):
    table = calibrate(source, samples, tmp_path / "out", **settings)
    assert table.layers.tolist() == [1, 2]
    assert table.tokens.tolist() == samples.tokens_per_corpus.tolist()
    for at, layer in enumerate(table.layers):
        for name, want in truths[layer].sums.items():
            where, found = f"layer {layer} {name}", getattr(table, name)[:, at]
            if name == "count":
                assert_same(found, want.astype(np.int64), where=where)
            else:
                assert_close(found, want, rel=REL, where=where)
    for layer, truth in enumerate(truths):
        path = tmp_path / "out" / "moments" / f"layer-{layer:03d}.npz"
        moments = LayerMoments.load(path)
        for source_name, matrix in (
            ("attention", "self_attn.g_proj"),
            ("feed", "mlp.shared_experts.up_proj" if layer else "mlp.gate_proj"),
        ):
            found, want = moments.of(matrix), truth.moments[source_name]
            assert_close(found, want, rel=REL, where=f"layer {layer} {matrix}")
        if layer:
            for name, matrix in (("gate_up", "up_proj"), ("down", "down_proj")):
                found = moments.of(f"mlp.switch_mlp.{matrix}")
                assert_close(found, truth.moments[name], rel=REL, where=name)
        assert_same(moments.tokens, samples.tokens_per_corpus, where="tokens")


@pytest.mark.usefixtures("float32")
def test_mixed_up_corpora_are_found(
    source: Path, samples: Samples, truths: list[Truth], tmp_path: Path
):
    """Broken twin: the labels one token late."""
    before = np.concatenate([samples.labels[:, :1], samples.labels[:, :-1]], axis=1)
    late = np.where(samples.labels < 0, samples.labels, before)
    wrong = replace(samples, labels=late, documents=late.astype(np.int32))
    table = calibrate(source, wrong, tmp_path / "late")
    for name, want in truths[1].sums.items():
        if name != "contribution_max":
            assert relative_error(getattr(table, name)[:, 0], want) > 100 * REL, name


@pytest.mark.usefixtures("float32")
def test_the_head_reads_final_states(source: Path, samples: Samples, tmp_path: Path):
    calibrate(source, samples, tmp_path / "out")
    found = LayerMoments.load(tmp_path / "out" / "moments" / "head.npz").of("lm_head")
    case = Case(source)
    oracle = Oracle(float64_weights(case.stored), case.text_config)
    want = np.zeros(found.shape)
    for tokens, labels in zip(samples.tokens, samples.labels, strict=True):
        final = oracle(tokens)[1]["final_hidden"]
        for token, label in enumerate(labels):
            if label >= 0:
                want[label] += final[token] ** 2
    assert_close(found, want, rel=REL, where="lm_head")


def test_memory_is_no_matter_and_steps_hardly_any(
    source: Path, samples: Samples, tmp_path: Path
):
    """A limit changes no bit; other steps change the last bits only."""
    first = calibrate(source, samples, tmp_path / "a", step_tokens=24)
    calibrate(source, samples, tmp_path / "b", step_tokens=24, memory_limit=0)
    assert results(tmp_path / "a") == results(tmp_path / "b")
    other = calibrate(source, samples, tmp_path / "c", step_tokens=4096)
    assert_same(other.count, first.count, where="count")
    assert_close(other.reap_sum, first.reap_sum, rel=1e-6, where="reap_sum")


def test_moments_may_be_left_out(source: Path, samples: Samples, tmp_path: Path):
    with_them = calibrate(source, samples, tmp_path / "on")
    without = calibrate(source, samples, tmp_path / "off", moments=False)
    assert without.digest == with_them.digest
    assert not (tmp_path / "off" / "moments").exists()
    assert len(list((tmp_path / "on" / "moments").iterdir())) == 4


def test_any_build_can_be_calibrated(
    build: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every format of the wild, two banks and quantised non-experts included."""
    # These folders have no tokenizer, and fewer ids than one has.
    monkeypatch.setattr(module, "check_samples", lambda *_: None)
    tokens = np.arange(16).reshape(2, 8)
    samples = samples_of("none", tokens, tokens // 4 % 2)
    said: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = calibrate(build.folder, samples, tmp_path / "out", tell=said.append)
    stream = LayerStream(build.folder)
    args = stream.args
    with_experts = [
        i for i in range(args.num_hidden_layers) if args.experts_in_layer(i)
    ]
    assert table.layers.tolist() == with_experts
    assert table.experts.tolist() == [args.experts_in_layer(i) for i in with_experts]
    assert said == list(stream.notes)
    rounded = any(name.endswith("gate.scales") for name in stream.folder.index.shard_of)
    assert any("stores the router" in note for note in said) == rounded


def test_two_banks_are_one(tmp_path: Path):
    """T2: experts count through both banks, in the statistics and in the moments."""
    folder = write_t2(tmp_path / "t2", tokenizer=True)
    samples = samples_for(folder)
    table = calibrate(folder, samples, tmp_path / "out")
    assert table.experts.tolist() == [12, 9, 16, 7]
    for layer, experts in zip(table.layers, table.experts, strict=True):
        moments = LayerMoments.load(
            tmp_path / "out" / "moments" / f"layer-{layer:03d}.npz"
        )
        found = moments.of("mlp.switch_mlp.bank_lo.down_proj")
        assert found.shape == (experts, 64)
        used = table.count[:, list(table.layers).index(layer), :experts].sum(axis=0) > 0
        assert ((found > 0).all(axis=1) == used).all()
        assert ((moments.of("mlp.switch_mlp.gate_proj") > 0).all(axis=1) == used).all()


def test_progress_tells_bytes_and_time(source: Path, samples: Samples, tmp_path: Path):
    seen: list[Progress] = []
    calibrate(source, samples, tmp_path / "out", step_tokens=24, progress=seen.append)
    stream = LayerStream(source)
    sizes = [stream.nbytes(i) for i in range(3)]
    assert [(p.layer, p.rows_done, p.finished) for p in seen] == [
        (layer, rows, rows == 4) for layer in range(3) for rows in (0, 2, 4)
    ]
    for progress in seen:
        assert progress.bytes_done + progress.bytes_left == pytest.approx(sum(sizes))
        assert progress.tokens == samples.tokens_per_corpus.sum()
    assert [p.bytes_done for p in seen] == sorted(p.bytes_done for p in seen)
    assert seen[0].seconds_left is None
    assert seen[-1].seconds_left == 0
    halfway = replace(seen[0], bytes_done=6e9, bytes_left=3e9, seconds=2.0)
    assert halfway.bytes_per_second == 3e9
    assert halfway.seconds_left == 1.0


def peak_of(folder: Path, layers: int) -> tuple[int, int]:
    """MLX's memory at its most while ``layers`` layers are calibrated; their weights."""
    kda = [i for i in range(1, layers + 1) if i != 2]
    source = write_source(
        folder / "source",
        num_hidden_layers=layers,
        num_experts=64,
        attn_res_block_size=layers,
        linear_attn_config={"kda_layers": kda, "full_attn_layers": [2]},
    )
    samples = samples_for(source, rows=2, length=8)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    calibrate(source, samples, folder / "out", memory_limit=0)
    peak = mx.get_peak_memory() - before
    stream = LayerStream(source)
    return peak, sum(stream.nbytes(i) for i in range(layers))


def test_memory_does_not_grow_with_depth(tmp_path: Path):
    few, _ = peak_of(tmp_path / "few", 5)
    many, weights = peak_of(tmp_path / "many", 15)
    assert many < 1.2 * few
    assert many < weights / 3
