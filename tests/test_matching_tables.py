"""Tables of ``kimi-k3 damage`` that are of another calibration than they lie beside."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import wide_config, wide_table

import kimi_k3
from kimi_k3.build.journal import HEAD, MOMENTS
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.config import ModelArgs
from kimi_k3.conversion.importance import Importance
from kimi_k3.errors import PlanError
from kimi_k3.models import Model
from kimi_k3.planning.damage_table import DamageTable
from kimi_k3.planning.make_plan import PlanResult
from kimi_k3.planning.matching_tables import check_probes
from kimi_k3.planning.matrix_classes import CLASS_BITS, class_matrices
from kimi_k3.planning.plan_sizes import SourceSizes
from kimi_k3.planning.probe_table import FILE_NAME as PROBES
from kimi_k3.planning.probe_table import ProbeTable

CLASSES = tuple(SourceSizes.of(wide_config()).classes)
PATHS = [
    path for _, path, _ in class_matrices(Model(ModelArgs.from_dict(wide_config())))
]
TABLE = replace(wide_table(), source={"fingerprint": "beef"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A calibration whose moments are files of any content: only digests are taken."""
    TABLE.save(tmp_path)
    (tmp_path / MOMENTS).mkdir()
    layers = ModelArgs.from_dict(wide_config()).text_config.num_hidden_layers
    for name in (HEAD, *(f"layer-{n:03d}.npz" for n in range(layers))):
        (tmp_path / MOMENTS / name).write_text(f"the moments of {name}")
    return tmp_path


def errors_of(table: SaliencyTable, folder: Path) -> DamageTable:
    """Damage measured with the moments that are in ``folder`` now."""
    layers, experts = len(table.layers), int(table.experts.max())
    drop = np.full((layers, experts), 1 / experts)
    fingerprint = table.source["fingerprint"]
    return DamageTable(
        source=table.source,
        layers=table.layers,
        experts=table.experts,
        low_bits=(2, 3),
        drop=drop,
        low=np.stack([drop / 2, drop / 4]),
        classes=CLASSES,
        bits=CLASS_BITS,
        classes_damage=np.tile(
            [0, *(4.0**-b for b in CLASS_BITS[1:])], (len(CLASSES), 1)
        ),
        sampled_experts=np.zeros((layers, 1), np.int64),
        settings={"moments": Importance(folder, fingerprint, PATHS).digest},
    )


def probes_of(table: SaliencyTable, **changes: Any) -> ProbeTable:
    """Probes of low banks of 2 bits, on the samples of ``table``."""
    layers, corpora = len(table.layers), len(table.corpora)
    stated: dict[str, Any] = {
        "corpora": table.corpora,
        "tokens": np.full(corpora, 100),
        "shares": np.full(corpora, 1 / corpora),
        "layers": table.layers,
        "classes": CLASSES,
        "bits": np.array([4]),
        "class_divergence": np.full((corpora, len(CLASSES), 1), 0.01),
        "low_bits": np.array([2]),
        "low_divergence": np.full((corpora, 1, layers), 0.1),
        "dropped": np.ones((layers, int(table.experts.max())), bool),
        "drop_divergence": np.full((corpora, layers), 0.5),
        "source": table.source,
        "samples": table.samples["fingerprint"],
        "settings": {},
    }
    return ProbeTable(**stated | changes)


def planned(folder: Path, **options: Any) -> PlanResult:
    return kimi_k3.plan(folder, wide_config(), memory=1_200_000, **options)


def test_tables_of_this_calibration_are_taken(folder: Path) -> None:
    errors, probes = errors_of(TABLE, folder), probes_of(TABLE)
    errors.save(folder)
    probes.save(folder / PROBES)
    about = planned(folder, criterion="damage", weights={"code": 1}).plan.about
    assert about["criterion"] == "damage"
    assert about["measured"]
    assert about["saliency"] == TABLE.digest
    assert about["weights"] == {"code": 1}
    assert about["damage_table"] == errors.digest
    assert about["probes"] == probes.digest
    assert 0 < about["bound"] <= about["damage"]


@pytest.mark.parametrize("kind", ["uniform", "global", "graded"])
def test_plans_by_rule_record_what_ranked(folder: Path, kind: str) -> None:
    errors = errors_of(TABLE, folder)
    errors.save(folder)
    about = planned(folder, kind=kind, criterion="damage").plan.about
    assert (about["criterion"], about["measured"]) == ("damage", True)
    assert about["damage_table"] == errors.digest
    assert "damage" not in about


def test_damage_with_moments_that_are_no_more(folder: Path) -> None:
    errors_of(TABLE, folder).save(folder)
    (folder / MOMENTS / "layer-002.npz").write_text("of more text")
    with pytest.raises(
        PlanError, match=r"damage.npz was measured with other moments"
    ) as e:
        planned(folder, criterion="damage")
    assert f"`kimi-k3 damage SOURCE {folder} --restart`" in str(e.value)
    (folder / MOMENTS / "layer-002.npz").unlink()
    with pytest.raises(PlanError, match=r"held against its moments: .*layer-002.npz"):
        planned(folder, criterion="damage")
    for file in (folder / MOMENTS).iterdir():
        file.unlink()
    (folder / MOMENTS).rmdir()
    assert planned(folder, criterion="damage").plan.about["measured"]


def test_probes_with_other_samples(folder: Path) -> None:
    probes_of(TABLE, samples="0123456789abcdef").save(folder / PROBES)
    with pytest.raises(
        PlanError, match="probes.npz was probed with other samples"
    ) as e:
        planned(folder)
    assert "with 0123456789ab, the saliency is of" in str(e.value)
    assert "--probes off" in str(e.value)
    assert "probes" not in planned(folder, probes=False).plan.about


def test_probes_of_one_part_of_a_merged_table(folder: Path) -> None:
    samples = {**TABLE.samples, "fingerprint": "both", "merged_from": ["a", "b"]}
    with pytest.raises(PlanError, match="of one calibration, .* is merged from 2"):
        check_probes(probes_of(TABLE), folder / PROBES, replace(TABLE, samples=samples))


def test_a_low_width_that_was_not_probed(folder: Path) -> None:
    probes_of(TABLE).save(folder / PROBES)
    with pytest.raises(
        PlanError, match="no probe of a low bank of 4 bits; there are 2"
    ):
        planned(folder, low_bits=4)
    with pytest.raises(PlanError, match=r"--probes off .* --low-bits 2 4 --restart`"):
        planned(folder, low_bits=4)
    assert planned(folder, low_bits=4, probes=False).plan.low_bits == 4


def test_no_low_bank_needs_no_width(folder: Path) -> None:
    """Damage of 3 and of 2 bits, probes of 3: uniform plans have neither."""
    errors_of(TABLE, folder).save(folder)
    probes_of(TABLE, low_bits=np.array([3])).save(folder / PROBES)
    report = planned(folder, kind="uniform", criterion="damage").report
    assert json.loads(json.dumps(report.to_dict()))["damage"]["nats"]
