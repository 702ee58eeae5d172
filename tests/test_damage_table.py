"""A table of measured damage: what is refused, and that its file keeps it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kimi_k3.build.sealed_npz import write_sealed
from kimi_k3.errors import PlanError
from kimi_k3.planning.damage import Damage
from kimi_k3.planning.damage_table import DamageTable
from kimi_k3.planning.matrix_classes import CLASS_BITS


def table(**changes: Any) -> DamageTable:
    drop = np.array([[0.5, 0.25, 0.25, 0.0], [0.125, 0.5, 0.125, 0.25]])
    values: dict[str, Any] = {
        "source": {"fingerprint": "f"},
        "layers": np.array([1, 2]),
        "experts": np.array([4, 4]),
        "low_bits": (2, 3),
        "drop": drop,
        "low": np.stack([drop / 4, drop / 8]),
        "classes": ("kda.o_proj", "lm_head"),
        "bits": CLASS_BITS,
        "classes_damage": np.outer([1.0, 2.0], [0, 1, 2, 3, 4, 5]),
        "sampled_experts": np.array([[0, 2], [1, -1]]),
        "settings": {"rows": 8},
    }
    return DamageTable(**values | changes)


def test_a_file_gives_the_table_back(tmp_path: Path) -> None:
    one = table()
    file = one.save(tmp_path)
    assert file == tmp_path / "damage.npz"
    for place in (file, tmp_path):
        found = DamageTable.load(place)
        assert found.digest == one.digest
        assert found.source == one.source
        assert found.classes == one.classes
        assert np.array_equal(found.low, one.low)
    assert file.read_bytes() == table().save(tmp_path / "again.npz").read_bytes()
    changed = replace(one, drop=one.drop[:, ::-1], low=one.low[..., ::-1])
    assert changed.digest != one.digest


def test_arrays_are_its_own() -> None:
    drop = table().drop.copy()
    one = table(drop=drop)
    drop[0, 0] = 7
    assert one.drop[0, 0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        one.low[0, 0, 0] = 1


def test_plans_are_made_from_it() -> None:
    damage = Damage.of_measured(table(), low_bits=3)
    assert np.array_equal(damage.low, table().low[1])
    assert damage.classes["lm_head"][4] == 8
    assert damage.source == {"fingerprint": "f"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"source": {}}, "does not say what was measured"),
        ({"layers": np.zeros(0, np.int64)}, "nothing was"),
        ({"low_bits": (2, 5)}, r"\(2, 5\)"),
        ({"bits": (16, 8)}, r"\(16, 8\)"),
        ({"drop": np.ones((2, 3))}, "drop is of shape"),
        ({"low": np.zeros((1, 2, 4))}, "low is of shape"),
        ({"experts": np.array([4.0, 4.0])}, "experts is of shape"),
        ({"classes": ("lm_head",)}, "classes_damage is of shape"),
        ({"drop": np.full((2, 4), np.nan)}, "drop holds"),
        ({"classes_damage": -np.ones((2, 6))}, "classes_damage holds"),
        ({"classes_damage": np.ones((2, 6))}, "damage at 16 bits"),
        ({"low": np.full((2, 2, 4), 0.3)}, "more damage than dropping"),
        ({"experts": np.array([4, 3])}, "does not exist"),
        ({"drop": np.full((2, 4), 0.5)}, "layer 1: dropping all .* 2.0, wanted 1"),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        table(**changes)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    file = table().save(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(PlanError, match=r"damage\.npz .*kimi-k3 damage"):
        DamageTable.load(tmp_path)
    write_sealed(file, "measured damage of a checkpoint", 1, {"drop": np.zeros(3)})
    with pytest.raises(PlanError, match="does not hold what"):
        DamageTable.load(tmp_path)
    with pytest.raises(PlanError, match="not there"):
        DamageTable.load(tmp_path / "elsewhere.npz")
