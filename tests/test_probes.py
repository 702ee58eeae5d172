"""Probes against the whole model with the same part changed; damage in nats."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from calibration_cases import samples_for, samples_of, write_source
from closeness import assert_close, to_numpy
from tiny_k3 import WIDE_EXPERTS, t1_config

import kimi_k3
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.input_moments import LayerMoments
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.sample_rows import Samples
from kimi_k3.checkpoint.stored_format import StoredFormat
from kimi_k3.config import ModelArgs
from kimi_k3.errors import PartialResultError, PlanError
from kimi_k3.loading import load
from kimi_k3.models import Model
from kimi_k3.planning import probe_damage as module
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.damage_table import DamageTable
from kimi_k3.planning.matrix_classes import class_matrices
from kimi_k3.planning.measure_damage import measure_damage
from kimi_k3.planning.probe_damage import Pass, measure_probes
from kimi_k3.planning.probe_list import LOW_LAYERS, all_probes
from kimi_k3.planning.probe_run import run_probes
from kimi_k3.planning.probe_table import FILE_NAME, ProbeTable
from kimi_k3.planning.probe_text import WINDOW, probe_windows
from kimi_k3.planning.probed_damage import probed
from kimi_k3.planning.probes import (
    NO_LAYER,
    ClassProbe,
    DropProbe,
    LowProbe,
    Probe,
    low_bank,
    rounded,
)

LENGTH, CORPORA = 12, 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1", **WIDE_EXPERTS)


@pytest.fixture(scope="module")
def samples(source: Path) -> Samples:
    return samples_for(source, length=LENGTH)


@pytest.fixture(scope="module")
def calibration(source: Path, samples: Samples) -> Path:
    out = source.parent / "calibration"
    calibrate(source, samples, out)
    return out


@pytest.fixture(scope="module")
def damage(source: Path, calibration: Path) -> DamageTable:
    return measure_damage(source, calibration, low_bits=(2,), experts_per_layer=2)


@pytest.fixture(scope="module")
def table(source: Path, calibration: Path, damage: DamageTable) -> ProbeTable:
    return measure_probes(source, calibration, damage, tokens=24)


def moments(calibration: Path, layer: int) -> LayerMoments:
    return LayerMoments.load(calibration / "moments" / f"layer-{layer:03d}.npz")


class WholeModel:
    """The loaded model, in float32, with parts of it changed by hand."""

    def __init__(self, source: Path, samples: Samples):
        self.model, _ = load(source)
        self.model.set_dtype(mx.float32)
        self.samples = samples
        self.source = self.log_probabilities()

    def log_probabilities(self) -> np.ndarray:
        logits = to_numpy(self.model(mx.array(self.samples.tokens))).astype(np.float64)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def divergence(self) -> np.ndarray:
        """KL(source ‖ as it is now), mean over each corpus."""
        now, p = self.log_probabilities(), np.exp(self.source)
        found = (p * (self.source - now)).sum(axis=-1)
        labels = self.samples.labels
        return np.array([found[labels == corpus].mean() for corpus in range(CORPORA)])

    def of_class(self, name: str, bits: int) -> np.ndarray:
        matrices = [m for c, _, m in class_matrices(self.model) if c == name]
        kept = [matrix["weight"] for matrix in matrices]
        for matrix, weight in zip(matrices, kept, strict=True):
            matrix["weight"] = rounded(weight, bits)
        found = self.divergence()
        for matrix, weight in zip(matrices, kept, strict=True):
            matrix["weight"] = weight
        return found

    def of_low(self, layer: int, bits: int, importance: LayerMoments) -> np.ndarray:
        experts = self.model.layers[layer].mlp.switch_mlp
        kept = {name: experts[name] for name in ("gate_proj", "up_proj", "down_proj")}
        for name, matrix in kept.items():
            weights = importance.of(f"mlp.switch_mlp.{name}")
            packed = low_bank(matrix.weight, matrix.scales, bits, weights)
            dense = StoredFormat("affine", bits, 64).dequantize(*packed)
            experts[name] = _Dense(dense)
        found = self.divergence()
        for name, matrix in kept.items():
            experts[name] = matrix
        return found

    def of_drop(self, layer: int, dropped: tuple[int, ...]) -> np.ndarray:
        moe = self.model.layers[layer].mlp
        kept = moe.e_score_correction_bias
        biases = to_numpy(kept).copy()
        biases[list(dropped)] = -np.inf
        moe.e_score_correction_bias = mx.array(biases)
        found = self.divergence()
        moe.e_score_correction_bias = kept
        return found


class _Dense(nn.Module):
    """Experts' matrices (E, out, in) without any quantisation."""

    def __init__(self, weight: mx.array):
        super().__init__()
        self.weight = weight

    def __call__(
        self, x: mx.array, ids: mx.array, sorted_indices: bool = False
    ) -> mx.array:
        """(…, 1, in) and ids (…) → (…, 1, out)."""
        return x @ self.weight[ids].swapaxes(-1, -2)


@pytest.fixture(scope="module")
def whole(source: Path, samples: Samples) -> WholeModel:
    return WholeModel(source, samples)


def run(source: Path, samples: Samples, probes: list[Probe], calibration: Path):
    return run_probes(
        LayerStream(source, dtype=mx.float32),
        samples.tokens,
        samples.labels,
        probes,
        corpora=CORPORA,
        rows_per_step=3,
        moments=lambda layer: moments(calibration, layer),
    )


def test_probes_run_side_by_side_and_change_nothing_else(
    source: Path, samples: Samples, calibration: Path, whole: WholeModel
):
    # A class of several layers, one of one kind, embedding, head, experts, router.
    probes: list[Probe] = [
        ClassProbe("embed_tokens", 4, NO_LAYER),
        ClassProbe("lm_head", 3, NO_LAYER),
        ClassProbe("kda.qkv_proj", 3, 0),
        ClassProbe("shared_experts.up_proj", 4, 1),
        ClassProbe("mla.o_proj", 3, 1),
        LowProbe(2, 2),
        DropProbe(1, (0, 3, 5, 6, 9, 15)),
    ]
    found = run(source, samples, probes, calibration)
    for probe in probes:
        if isinstance(probe, ClassProbe):
            wanted = whole.of_class(probe.name, probe.bits)
        elif isinstance(probe, LowProbe):
            wanted = whole.of_low(2, 2, moments(calibration, 2))
        else:
            wanted = whole.of_drop(1, probe.experts)
        assert (wanted > 1e-6).all(), "a probe that changes nothing shows nothing"
        assert_close(found[probe], wanted, rel=2e-3)
    twice = run(source, samples, probes[3:], calibration)
    for probe in probes[3:]:
        np.testing.assert_array_equal(twice[probe], found[probe])


def test_a_probe_that_begins_too_late_is_another(
    source: Path, samples: Samples, calibration: Path, whole: WholeModel
):
    late = ClassProbe("kda.qkv_proj", 3, 2)  # layer 0 has one, too
    found = run(source, samples, [late], calibration)[late]
    wanted = whole.of_class("kda.qkv_proj", 3)
    assert np.abs(found - wanted).max() > 0.05 * wanted.max()


def test_everything_is_probed_once(table: ProbeTable, source: Path):
    classes = {name for name, _, _ in class_matrices(LayerStream(source).model)}
    # Of 24, 16 and 8 columns, which no group divides.
    narrow = {"mla.q_b_proj", "mla.kv_b_proj"}
    assert set(table.classes) == classes - narrow
    assert table.layers.tolist() == [1, 2]
    assert table.dropped.sum(axis=1).tolist() == [8, 8]
    assert (table.drop_divergence > 0).all()
    assert (table.low_divergence > 0).all()
    assert (table.tokens > 0).all()
    # Fewer bits move the answers further.
    mean = table.mean(table.class_divergence, None)
    assert (mean[:, 0] < mean[:, 2]).all()


def test_the_lesser_half_is_dropped(table: ProbeTable, damage: DamageTable):
    for share, dropped in zip(damage.drop, table.dropped, strict=True):
        assert share[dropped].max() <= share[~dropped].min()


def test_passes_that_were_finished_are_not_run_again(
    source: Path,
    calibration: Path,
    damage: DamageTable,
    table: ProbeTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    out = tmp_path / "again"
    out.mkdir()
    for path in calibration.iterdir():
        if path.name != FILE_NAME:
            (out / path.name).symlink_to(path)
    done: list[Pass] = []

    def stop(where: Pass) -> None:
        done.append(where)
        if where.number == 3:
            raise KeyboardInterrupt

    memory = 40 * 24 * 64 * 4
    with pytest.raises(KeyboardInterrupt):
        measure_probes(source, out, damage, tokens=24, memory=memory, progress=stop)
    assert done[0].passes > 3
    assert not (out / FILE_NAME).exists()
    ran: list[int] = []
    through = module.run_probes

    def counted(*args, **options):
        ran.append(len(args[3]))
        return through(*args, **options)

    monkeypatch.setattr(module, "run_probes", counted)
    found = measure_probes(source, out, damage, tokens=24, memory=memory)
    assert len(ran) == done[0].passes - 2
    # Rows go through in the same steps whatever the pass holds.
    assert found.digest == table.digest
    assert sorted(p.name for p in (out / module.PARTIAL).glob("*")) == []
    measure_probes(source, out, damage, tokens=24, memory=memory)
    assert len(ran) == done[0].passes - 2, "a finished table is read"


def test_probes_of_another_calibration_are_refused(
    source: Path, calibration: Path, damage: DamageTable
):
    other = replace(damage, source={"fingerprint": "another"})
    with pytest.raises(PlanError, match="another checkpoint"):
        measure_probes(source, calibration, other)


def test_damage_in_nats(table: ProbeTable, damage: DamageTable):
    errors = Damage.of_measured(damage, 2)
    nats = probed(errors, table)
    wanted = table.mean(table.drop_divergence, None)
    for row, dropped, total in zip(nats.drop, table.dropped, wanted, strict=True):
        assert row[dropped].sum() == pytest.approx(total)
    np.testing.assert_allclose(
        nats.drop / nats.drop.sum(axis=1, keepdims=True),
        errors.drop / errors.drop.sum(axis=1, keepdims=True),
    )
    low = table.mean(table.low_divergence, None)[0]
    assert (nats.low.sum(axis=1) <= low * (1 + 1e-9)).all()
    tried = table.mean(table.class_divergence, None)[table.classes.index("lm_head")]
    of_head = nats.classes["lm_head"]
    assert of_head[16] == 0
    assert of_head[8] == pytest.approx(tried[0])
    assert of_head[3] == pytest.approx(tried[2])
    assert of_head[8] < of_head[6] < of_head[5] < of_head[4]


def test_weights_choose_the_corpora(table: ProbeTable, damage: DamageTable):
    errors = Damage.of_measured(damage, 2)
    code = probed(errors, table, {"code": 1.0})
    at = table.corpora.index("code")
    row, dropped = code.drop[0], table.dropped[0]
    assert row[dropped].sum() == pytest.approx(table.drop_divergence[at, 0])
    with pytest.raises(PlanError, match="code, prose, chinese"):
        probed(errors, table, {"poetry": 1.0})


def test_probes_lack_a_width(table: ProbeTable, source: Path, damage: DamageTable):
    with pytest.raises(PlanError, match="low bank of 3 bits was not probed"):
        probed(replace(Damage.of_measured(damage, 2), low_bits=3), table)


def test_a_changed_file_is_named(table: ProbeTable, tmp_path: Path):
    path = table.save(tmp_path / "probes.npz")
    assert ProbeTable.load(path).digest == table.digest
    content = bytearray(path.read_bytes())
    content[content.index(table.drop_divergence.tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(PlanError, match=str(path)):
        ProbeTable.load(path)


def test_saliency_of_the_same_source(table: ProbeTable, calibration: Path):
    assert table.source == SaliencyTable.load(calibration).source


@pytest.mark.parametrize("criterion", ["damage", "reap_sum"])
def test_plans_are_made_in_nats_where_there_are_probes(
    calibration: Path, source: Path, table: ProbeTable, criterion: str
):
    asked = {"memory": 340_000, "criterion": criterion}
    made = kimi_k3.plan(calibration, source, **asked)
    found = made.report.damage
    assert found is not None
    assert found.nats
    assert made.plan.about["probes"] == table.digest
    assert "and probes;" in made.report.text()
    without = kimi_k3.plan(calibration, source, probes=False, **asked).report
    assert without.damage is not None
    assert not without.damage.nats
    assert "and probes" not in without.text()


def test_other_settings_are_refused(
    source: Path, calibration: Path, damage: DamageTable, table: ProbeTable
):
    with pytest.raises(PartialResultError, match="tokens = 24, which is 36 now"):
        measure_probes(source, calibration, damage, tokens=36)
    with pytest.raises(PlanError, match="0 tokens"):
        measure_probes(source, calibration, damage, tokens=0)


def test_a_corpus_that_was_not_probed_has_no_weight(table: ProbeTable):
    tokens = table.tokens.copy()
    tokens[1] = 0
    partly = replace(table, tokens=tokens)
    with pytest.raises(PlanError, match="no text of corpus prose was probed"):
        partly.mean(partly.drop_divergence, None)
    found = partly.mean(partly.drop_divergence, {"code": 3, "chinese": 1})
    by_hand = 0.75 * table.drop_divergence[0] + 0.25 * table.drop_divergence[2]
    np.testing.assert_allclose(found, by_hand)


def test_without_weights_corpora_count_as_they_were_calibrated(table: ProbeTable):
    shares = np.array([0.2, 0.3, 0.5])
    found = replace(table, shares=shares).mean(table.drop_divergence, None)
    np.testing.assert_allclose(found, shares @ table.drop_divergence)


def test_layers_that_were_not_lowered_follow_what_they_fell(
    table: ProbeTable, damage: DamageTable
):
    low = table.low_divergence.copy()
    low[:, :, 1] = np.nan
    errors = Damage.of_measured(damage, 2)
    found = probed(errors, replace(table, low_divergence=low))
    fallen = table.mean(table.drop_divergence, None)
    tried = table.mean(table.low_divergence, None)[0, 0]
    wanted = np.minimum(
        errors.low[1] / errors.low[1].sum() * tried * fallen[1] / fallen[0],
        found.drop[1],
    )
    np.testing.assert_allclose(found.low[1], wanted)


def test_few_layers_are_lowered_in_a_deep_model():
    layers = {
        "num_hidden_layers": 40,
        "linear_attn_config": {
            "kda_layers": list(range(1, 40)),
            "full_attn_layers": [40],
        },
    }
    model = Model(ModelArgs.from_dict(t1_config(**WIDE_EXPERTS | layers)))
    dropped = np.ones((39, 16), bool)
    probes = all_probes(model, dropped)
    lowered = [p.first for p in probes if isinstance(p, LowProbe)]
    assert len(lowered) == LOW_LAYERS
    assert (lowered[0], lowered[-1]) == (1, 39)
    assert sum(isinstance(p, DropProbe) for p in probes) == 39


def test_every_corpus_has_windows_of_its_own():
    # Rows of one corpus after the other; the last is scattered and rare.
    rows, length = 12, 2 * WINDOW
    labels = np.repeat(np.arange(3), 4)[:, None] * np.ones(length, int)
    labels[:, -5:] = -1
    labels[2, 7:9] = 3
    ids = np.arange(rows * length).reshape(rows, length) % 97
    samples = replace(
        samples_of("tokenizer", ids, np.minimum(labels, 2)),
        corpora=tuple("abcd"),
        labels=labels.astype(np.int16),
    )
    found, of = probe_windows(samples, 4 * WINDOW)
    counts = np.bincount(of[of >= 0], minlength=4)
    assert found.shape == of.shape == (4, WINDOW)
    assert (counts > 0).all()
    assert counts[3] == 2, "all there is"
    more, _ = probe_windows(samples, 12 * WINDOW)
    assert len(more) > len(found)
