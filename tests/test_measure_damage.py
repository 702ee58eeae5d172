"""Measured damage against float64 loops over the source's own tensors."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from calibration_cases import samples_for, write_source
from closeness import assert_close, to_numpy
from oracle_mxfp4 import affine, mxfp4
from tiny_k3 import WIDE_EXPERTS

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.input_moments import LayerMoments
from kimi_k3.checkpoint.source_layout import expert_prefix, layer_prefix
from kimi_k3.cli import main
from kimi_k3.conversion.quantizer import quantize, squared_error
from kimi_k3.errors import ConversionError, KimiK3Error, PartialResultError, PlanError
from kimi_k3.planning import measure_damage as module
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.damage_table import DamageTable
from kimi_k3.planning.matrix_classes import CLASS_BITS
from kimi_k3.planning.measure_damage import Progress, measure_damage

LAYERS = 3
LOW_BITS = (2, 3)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source") / "t1", **WIDE_EXPERTS)


@pytest.fixture(scope="module")
def calibration(source: Path) -> Path:
    out = source.parent / "calibration"
    calibrate(source, samples_for(source), out)
    return out


@pytest.fixture(scope="module")
def tensors(source: Path) -> dict[str, mx.array]:
    found: dict[str, mx.array] = {}
    for shard in sorted(source.glob("*.safetensors")):
        found |= mx.load(str(shard))  # type: ignore[arg-type]
    return found


@pytest.fixture(scope="module")
def table(source: Path, calibration: Path) -> DamageTable:
    out = calibration.parent / "table.npz"
    return measure_damage(
        source, calibration, low_bits=LOW_BITS, experts_per_layer=3, out=out
    )


def expert_matrix(
    tensors: dict[str, mx.array], layer: int, expert: int, part: str
) -> np.ndarray:
    prefix = f"{expert_prefix(layer, expert)}{part}.weight_"
    return mxfp4(*(to_numpy(tensors[prefix + kind]) for kind in ("packed", "scale")))


def moments_of(calibration: Path, layer: int) -> LayerMoments:
    return LayerMoments.load(calibration / "moments" / f"layer-{layer:03d}.npz")


def relative_error(
    weight: np.ndarray, moment: np.ndarray, bits: int, group_size: int, *, use: bool
) -> float:
    """Σ (w - w')²·x² over Σ w²·x², float64, of what a conversion stores."""
    channel = mx.array(moment.astype(np.float32)) if use else None
    options: Any = {"bits": bits, "group_size": group_size, "importance": channel}
    stored = quantize(mx.array(weight.astype(np.float32)), **options)
    left = weight - affine(*map(to_numpy, stored), bits=bits)  # type: ignore
    return float((left**2 * moment).sum() / (weight**2 * moment).sum())


def test_dropping_costs_the_share_of_what_is_written(
    table: DamageTable, tensors: dict[str, mx.array], calibration: Path
):
    assert table.layers.tolist() == [1, 2]
    for at, layer in enumerate((1, 2)):
        down = moments_of(calibration, layer).down
        assert down is not None
        energies = [
            (expert_matrix(tensors, layer, e, "w2") ** 2 * down[e].astype(float)).sum()
            for e in range(16)
        ]
        shares = np.array(energies) / sum(energies)
        assert_close(table.drop[at], shares, rel=1e-5)
        # Broken twin: every expert weighed with another's inputs.
        wrong = [
            (expert_matrix(tensors, layer, e, "w2") ** 2 * down[e - 1]).sum()
            for e in range(16)
        ]
        assert np.abs(table.drop[at] - np.array(wrong) / sum(wrong)).max() > 1e-3


def test_low_bank(table: DamageTable, tensors: dict[str, mx.array], calibration: Path):
    assert table.low_bits == (2, 3)
    for at, layer in enumerate((1, 2)):
        moments = moments_of(calibration, layer)
        read = {"w1": moments.gate_up, "w3": moments.gate_up, "w2": moments.down}
        sampled = table.sampled_experts[at].tolist()
        ranking = np.argsort(-table.drop[at], kind="stable")
        alive = int((table.drop[at] > 0).sum())
        assert len(sampled) == 3
        assert {int(ranking[0]), int(ranking[alive - 1])} < set(sampled)
        for width, bits in enumerate(table.low_bits):
            ratios = []
            for expert in sampled:
                parts = [
                    relative_error(
                        expert_matrix(tensors, layer, expert, part),
                        moment[expert].astype(float),  # type: ignore[index]
                        bits,
                        64,
                        use=True,
                    )
                    for part, moment in read.items()
                ]
                ratios.append(sum(parts))
            low = table.drop[at] * np.mean(ratios)
            low[sampled] = table.drop[at][sampled] * ratios
            assert_close(table.low[width, at], low, rel=1e-5)


def test_classes(table: DamageTable, tensors: dict[str, mx.array], calibration: Path):
    assert table.bits == CLASS_BITS
    damage = dict(zip(table.classes, table.classes_damage, strict=True))
    wanted: dict[str, Any] = {}
    parts = {"shared_experts.up_proj": [], "kda.qkv_proj": [], "dense.down_proj": []}
    for layer in range(LAYERS):
        moments = moments_of(calibration, layer)
        prefix = layer_prefix(layer)
        if layer:
            name = f"{prefix}block_sparse_moe.shared_experts.up_proj.weight"
            moment = moments.of("mlp.shared_experts.up_proj").astype(float).sum(0)
            parts["shared_experts.up_proj"].append((to_numpy(tensors[name]), moment))
        else:
            name = f"{prefix}mlp.down_proj.weight"
            moment = moments.of("mlp.down_proj").astype(float).sum(0)
            parts["dense.down_proj"].append((to_numpy(tensors[name]), moment))
        if layer != 1:
            names = [f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"]
            weight = np.concatenate([to_numpy(tensors[name]) for name in names])
            moment = moments.of("self_attn.qkv_proj").astype(float).sum(0)
            parts["kda.qkv_proj"].append((weight, moment))
    for name, matrices in parts.items():
        group = 32 if name == "dense.down_proj" else 64
        wanted[name] = [0.0] + [
            sum(relative_error(w, m, bits, group, use=True) for w, m in matrices)
            for bits in CLASS_BITS[1:]
        ]
    embedding = to_numpy(tensors["language_model.model.embed_tokens.weight"])
    alike = np.ones(embedding.shape[1])
    wanted["embed_tokens"] = [0.0] + [
        relative_error(embedding, alike, bits, 64, use=False) for bits in CLASS_BITS[1:]
    ]
    for name, figures in wanted.items():
        assert_close(damage[name], np.array(figures), rel=1e-4, where=name)
    # The low-rank query has 24 columns, which no group divides.
    assert not damage["mla.q_b_proj"].any()
    assert damage["mla.q_a_proj"][1:].all()
    assert damage["lm_head"][1:].all()


def test_errors_of_independent_inputs_add_up():
    """What the figures stand for: Σ ‖ΔW x‖² over real inputs; not if inputs agree."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((96, 64)).astype(np.float32)
    inputs = rng.standard_normal((20_000, 64)) * np.exp(rng.standard_normal(64))
    moment = mx.array((inputs**2).sum(0).astype(np.float32))
    options: Any = {"bits": 2, "group_size": 64, "importance": moment}
    stored = quantize(mx.array(weight), **options)
    error, energy = squared_error(mx.array(weight), stored, **options)
    left = weight - affine(*map(to_numpy, stored), bits=2)  # type: ignore
    assert error == pytest.approx(((inputs @ left.T) ** 2).sum(), rel=0.02)
    assert energy == pytest.approx(((inputs @ weight.T) ** 2).sum(), rel=0.02)
    agreeing = inputs[:, :1] * np.sqrt((inputs**2).sum(0) / (inputs[:, 0] ** 2).sum())
    assert abs(((agreeing @ left.T) ** 2).sum() / error - 1) > 0.1


def test_a_plan_can_be_made_from_it(table: DamageTable):
    damage = Damage.of_measured(table, 2)
    assert (damage.low <= damage.drop).all()
    assert 0.01 < damage.low.sum() / damage.drop.sum() < 0.6


def test_fewer_rows_give_like_figures(
    source: Path, calibration: Path, table: DamageTable
):
    out = calibration.parent / "few.npz"
    few = measure_damage(
        source, calibration, low_bits=LOW_BITS, experts_per_layer=3, rows=32, out=out
    )
    assert np.array_equal(few.drop, table.drop)
    some = table.classes_damage > 0
    ratios = few.classes_damage[some] / table.classes_damage[some]
    assert 0.5 < ratios.min() < 1 < ratios.max() < 2
    assert few.digest != table.digest


def test_goes_on_where_it_was_stopped(
    source: Path, calibration: Path, monkeypatch: pytest.MonkeyPatch
):
    all_classes = module.measure_classes
    monkeypatch.setattr(
        module, "measure_classes", lambda m, *others: all_classes(m[:1], *others)
    )
    options: Any = {"low_bits": LOW_BITS, "experts_per_layer": 3}
    whole_table = calibration.parent / "whole.npz"
    table = measure_damage(source, calibration, out=whole_table, **options)
    partial, result = calibration / "damage-partial", calibration / "damage.npz"
    calls: list[Progress] = []

    def stop(progress: Progress) -> None:
        calls.append(progress)
        if progress.layer == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_damage(source, calibration, progress=stop, **options)
    assert sorted(path.name for path in partial.glob("*.npz")) == [
        "layer-000.npz",
        "layer-001.npz",
    ]
    assert not result.exists()
    assert calls[-1].bytes_left > 0
    assert calls[-1].seconds_left is not None
    with pytest.raises(PartialResultError, match=r"low_bits = \[2, 3\], .* --restart"):
        measure_damage(source, calibration, **options | {"low_bits": [2]})
    whole = (partial / "layer-001.npz").read_bytes()
    (partial / "layer-001.npz").write_bytes(whole[:-40])
    with pytest.raises(PartialResultError, match="layer-001.npz is damaged"):
        measure_damage(source, calibration, **options)
    (partial / "layer-001.npz").write_bytes(whole)

    notes: list[str] = []
    measured: list[str] = []
    really = module.measure_experts
    monkeypatch.setattr(
        module,
        "measure_experts",
        lambda *a, **k: measured.append(a[1]) or really(*a, **k),
    )
    found = measure_damage(source, calibration, tell=notes.append, **options)
    assert found.digest == table.digest
    assert notes == ["layers 0 to 1 were measured before."]
    assert [path.split(".")[3] for path in measured] == ["2"]
    assert not partial.exists()
    again = measure_damage(source, calibration, tell=notes.append, **options)
    assert again.digest == table.digest
    assert "nothing to do" in notes[-1]
    assert len(measured) == 1
    with pytest.raises(PartialResultError, match="experts_per_layer = 3"):
        measure_damage(source, calibration, **options | {"experts_per_layer": 2})
    afresh = measure_damage(source, calibration, restart=True, **options)
    assert (afresh.digest, len(measured)) == (table.digest, 3)


def test_what_cannot_be_measured_is_refused(
    source: Path, calibration: Path, tmp_path: Path
):
    cases: list[tuple[type[KimiK3Error], str, dict[str, Any]]] = [
        (PlanError, "low_bits are", {"low_bits": [8]}),
        (PlanError, "low_bits are", {"low_bits": []}),
        (PlanError, "experts_per_layer is 0", {"experts_per_layer": 0}),
        (PlanError, "rows is 0", {"rows": 0}),
        (PlanError, "is no folder", {"out": tmp_path / "no" / "file.npz"}),
    ]
    for error, words, options in cases:
        with pytest.raises(error, match=words):
            measure_damage(source, calibration, **options)
    with pytest.raises(ConversionError, match=r"saliency\.npz"):
        measure_damage(source, tmp_path)
    other = write_source(tmp_path / "other", **WIDE_EXPERTS | {"vocab_size": 640})
    with pytest.raises(ConversionError, match="another checkpoint"):
        measure_damage(other, calibration)
    narrow = write_source(tmp_path / "narrow")
    with pytest.raises(PlanError, match="32 columns"):
        measure_damage(narrow, calibration)


def test_missing_moments_are_named(source: Path, calibration: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    (copy / "moments").mkdir(parents=True)
    for name in ("saliency.npz", "moments/layer-000.npz", "moments/head.npz"):
        (copy / name).write_bytes((calibration / name).read_bytes())
    with pytest.raises(ConversionError, match=r"layer-001\.npz"):
        measure_damage(source, copy)


def test_command(
    source: Path, calibration: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    copy = tmp_path / "calibration"
    copy.mkdir()
    for path in calibration.iterdir():
        if path.name not in ("damage.npz", "probes.npz"):
            (copy / path.name).symlink_to(path)
    out = copy / "damage.npz"
    command = [
        "damage",
        str(source),
        str(copy),
        "--low-bits",
        "2",
        "--rows",
        "8",
    ]
    command += ["--experts-per-layer", "1"]
    command += ["--probes", "off"]
    assert main(command) == 0
    printed = capsys.readouterr()
    assert "shared_experts.up_proj" in printed.out
    assert "layer 3 of 3" in printed.err
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["digest"] == DamageTable.load(out).digest
    assert "nothing to do" in printed.err
    assert main(["damage", str(source), str(tmp_path)]) == 2
