"""SaliencyTable: sums are checked, weighted, merged, and kept in a file that tells."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saliency_tables import (
    SOURCE,
    record,
    samples_of,
    small_table,
    stack,
    table_of,
    with_changed,
)

from kimi_k3.build import saliency
from kimi_k3.build.saliency import CRITERIA, SaliencyTable
from kimi_k3.build.saliency_checks import STATISTICS, ranges
from kimi_k3.build.sealed_npz import write_sealed
from kimi_k3.errors import SaliencyError

Change = Callable[[dict[str, np.ndarray]], Any]


def spoil(change: Change) -> SaliencyTable:
    """The small table after ``change`` of its statistics."""
    table = small_table()
    arrays = {name: array.copy() for name, array in table.statistics.items()}
    change(arrays)
    return with_changed(table, **arrays)


def put(name: str, at: tuple[Any, ...], value: Any) -> Change:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][at] = value

    return change


def add(name: str, at: tuple[int, int, int], value: Any) -> Change:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[name][at] += value

    return change


def test_small_table_is_sound() -> None:
    table = spoil(lambda arrays: None)
    assert table.shape == (2, 3, 8)
    assert table.exists.sum(axis=1).tolist() == [8, 6, 8]
    assert table.digest == small_table().digest != small_table(1).digest
    with pytest.raises(ValueError, match="read-only"):
        table.count[0, 0, 0] = 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            put("reap_sum", (1, 2, 5), np.nan),
            "layer 4, expert 5, corpus python: reap_sum is nan; wanted a finite number",
        ),
        (
            put("gate_sum", (0, 0, 3), np.inf),
            "layer 1, expert 3, corpus code: gate_sum",
        ),
        (
            put("relative_sum", (0, 1, 0), -1.0),
            "relative_sum is -1.0; wanted 0 or more",
        ),
        (put("reap_sum", (0, 1, 7), 1.0), "layer 2, expert 7.*no such expert"),
        (
            add("count", (1, 0, 2), 1),
            "layer 1, corpus python: 41 choices.*wanted 20 tokens × 2 = 40",
        ),
        (
            put("count", (0, 0), [80, 0, 0, 0, 0, 0, 0, 0]),
            "count is 80; wanted no more",
        ),
        (
            put("reap_sum", (slice(None), slice(None)), 0.0),
            "reap_sum of code, python is 0 for every expert of layers 1-2, 4: nothing "
            "tells which of them matter. Calibrate again",
        ),
        (
            put("relative_sum", (1, [0, 2]), 0.0),
            "relative_sum of python is 0 for every expert of layers 1, 4",
        ),
        (lambda a: a["contribution_max"].__imul__(1e6), "contribution_max.*reap_sum"),
        (
            lambda a: a["contribution_max"].__imul__(1e-6),
            "reap_sum is.*contribution_max",
        ),
        (lambda a: a["gate_square_sum"].__imul__(1e6), "gate_square_sum.*gate_sum²"),
        (lambda a: a["gate_square_sum"].__imul__(1e-6), "gate_sum is.*count × Σ g²"),
        (
            lambda a: a.__setitem__("reap_sum", a["reap_sum"].astype(np.float32)),
            "reap_sum is of shape.*float32; wanted.*float64",
        ),
        (
            lambda a: a.__setitem__("count", a["count"][:, :2]),
            r"count is of shape \(2, 2, 8\).*wanted.*\(2, 3, 8\)",
        ),
    ],
)
def test_what_no_calibration_gives(change: Change, message: str) -> None:
    with pytest.raises(SaliencyError, match=message):
        spoil(change)


@pytest.mark.parametrize("name", [n for n in STATISTICS if n != "count"])
def test_zero_counts_and_zero_sums_go_together(name: str) -> None:
    rare = small_table(3)
    c, l, e = np.argwhere((rare.count == 0) & rare.exists)[0]
    arrays = rare.statistics[name].copy()
    arrays[c, l, e] = 0.5
    with pytest.raises(SaliencyError, match=f"expert {e}.*{name}.*no token chose"):
        with_changed(rare, **{name: arrays})


def test_a_chosen_expert_has_a_gate() -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        c, l, e = np.argwhere(arrays["count"] > 0)[0]
        for name in arrays:
            if name != "count":
                arrays[name][c, l, e] = 0

    with pytest.raises(SaliencyError, match="gate_sum is 0.0; wanted more"):
        spoil(change)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tokens": np.array([40, 0])},
            "no token of python was calibrated.*experts of layers 1-2, 4 matter",
        ),
        ({"corpora": ("code", "code")}, "corpus code is there twice"),
        ({"corpora": ()}, "corpora are named"),
        ({"tokens": np.array([40, 20], np.int32)}, "tokens is of shape.*int32"),
        ({"tokens": [40, 20]}, "tokens is a list"),
        ({"layers": np.array([1, 4, 2])}, r"layers are \[1, 4, 2\]; wanted rising"),
        ({"top_k": 7}, "layer 2 has 6 experts but the router picks 7"),
        ({"top_k": 0}, "top_k is 0"),
        ({"source": {}}, "does not say what was calibrated"),
        ({"samples": {"fingerprint": "x"}}, "samples lack tokenizer, document_hashes"),
    ],
)
def test_an_outline_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SaliencyError, match=message):
        with_changed(small_table(), **changes)


def empty_layers() -> dict[int, dict[str, np.ndarray]]:
    zeros = {name: np.zeros((1, 8), dtype) for name, dtype in STATISTICS.items()}
    return {1: zeros, 2: zeros}


@pytest.mark.parametrize("tokens", [0, 40])
def test_an_empty_calibration_is_refused_when_made_saved_and_loaded(
    tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B34: without saliency, experts would be dropped by their number."""
    layers = empty_layers()
    if tokens:  # counted, but worth nothing
        for sums in layers.values():
            sums["count"] = np.full((1, 8), 10)

    def make() -> SaliencyTable:
        return SaliencyTable.from_layers(
            layers,
            corpora=["code"],
            tokens=[tokens],
            top_k=2,
            source=SOURCE,
            samples=samples_of("a"),
        )

    message = "layers 1-2.*Calibrate again"
    with pytest.raises(SaliencyError, match=message):
        make()
    with monkeypatch.context() as patch:  # a tool that does not look writes it anyway
        patch.setattr(SaliencyTable, "__post_init__", lambda self: None)
        arrays = make()._arrays()
    file = tmp_path / "saliency.npz"
    write_sealed(file, saliency.KIND, saliency.VERSION, arrays)
    with pytest.raises(SaliencyError, match=message):
        SaliencyTable.load(file)


def test_layers_are_put_together() -> None:
    table = small_table()
    rng = np.random.default_rng(0)
    sums = [record(rng, tokens, 8, 2) for tokens in (40, 20)]
    for c, recorded in enumerate(sums):
        for name, array in recorded.items():
            assert np.array_equal(table.statistics[name][c, 0], array)
    assert table.layers.tolist() == [1, 2, 4]
    with pytest.raises(SaliencyError, match="no layer has experts"):
        table_of_nothing()


def table_of_nothing() -> SaliencyTable:
    return SaliencyTable.from_layers(
        {}, corpora=["a"], tokens=[1], top_k=1, source=SOURCE, samples=samples_of("a")
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda sums: sums.pop("gate_sum"), "layer 2 lacks gate_sum"),
        (
            lambda sums: sums.update(reap_sum=sums["reap_sum"][:1]),
            r"layer 2: reap_sum is of shape \(1, 8\).*wanted \(2, 8\)",
        ),
        (
            lambda sums: sums.update(count=sums["count"].astype(float)),
            "layer 2: count is of.*float64; wanted.*int64",
        ),
    ],
)
def test_layers_that_do_not_fit(
    change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    rng = np.random.default_rng(0)
    recorded = {i: [record(rng, 10, 8, 2) for _ in range(2)] for i in (1, 2)}
    layers = stack(recorded)
    change(layers[2])
    with pytest.raises(SaliencyError, match=message):
        SaliencyTable.from_layers(
            layers,
            corpora=["code", "python"],
            tokens=[10, 10],
            top_k=2,
            source=SOURCE,
            samples=samples_of("a"),
        )


# Scores


def test_criteria_by_a_loop() -> None:
    table = small_table()
    weights = {"code": 0.75, "python": 0.25}
    wanted = {criterion: np.zeros((3, 8)) for criterion in CRITERIA}
    names = {"relative": "relative_sum", "frequency": "count", "gate": "gate_sum"}
    for l in range(3):
        for e in range(8):
            per_token = {
                name: sum(
                    weights[corpus] * array[c, l, e] / table.tokens[c]
                    for c, corpus in enumerate(table.corpora)
                )
                for name, array in table.statistics.items()
            }
            for criterion in CRITERIA:
                name = names.get(criterion, "reap_sum")
                wanted[criterion][l, e] = per_token[name]
            if per_token["count"]:
                wanted["reap_mean"][l, e] /= per_token["count"]
    for criterion in CRITERIA:
        found = table.score(criterion, weights)
        assert found.shape == (3, 8)
        assert np.abs(found - wanted[criterion]).max() <= 1e-15 * found.max()
        assert not found[~table.exists].any()


def test_a_weighted_score_is_that_of_a_recording_in_those_proportions() -> None:
    """Three tokens of code to one of Chinese, by weights and by repeated text."""
    rng = np.random.default_rng(5)
    code, chinese = record(rng, 32, 8, 2), record(rng, 64, 8, 2)
    two = table_of({1: [code, chinese]}, tokens=(32, 64), corpora=("code", "chinese"))
    # The same documents again and again: 192 tokens of code, 64 of Chinese.
    mixed = {name: 6 * code[name] + chinese[name] for name in STATISTICS}
    mixed["contribution_max"] = np.maximum(
        code["contribution_max"], chinese["contribution_max"]
    )
    one = table_of({1: [mixed]}, tokens=(256,), corpora=("mixed",))
    weights = {"code": 0.75, "chinese": 0.25}
    for criterion in CRITERIA:
        assert np.array_equal(two.score(criterion, weights), one.score(criterion))
        other = two.score(criterion, {"code": 0.5, "chinese": 0.5})
        assert not np.array_equal(other, one.score(criterion))


@pytest.mark.parametrize("seed", range(5))
def test_token_shares_give_the_plain_sums(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = {1: [record(rng, tokens, 8, 2) for tokens in (48, 16)]}
    table = table_of(layers, tokens=(48, 16))
    shares = {"code": 0.75, "python": 0.25}
    plain = {"reap_sum": "reap_sum", "frequency": "count", "gate": "gate_sum"}
    for criterion, name in plain.items():
        sums = table.statistics[name].sum(axis=0)
        for weights in (None, shares, {k: 64 * v for k, v in shares.items()}):
            assert np.array_equal(table.score(criterion, weights) * 64, sums)
    assert table.shares().tolist() == [0.75, 0.25]


def test_one_corpus_alone() -> None:
    table = small_table()
    score = table.score("reap_sum", {"python": 3})
    assert np.array_equal(score, table.reap_sum[1] * (1 / 20))


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"cod": 1}, "has no corpus cod; it has code, python"),
        ({"code": -1, "python": 2}, "weights are .*0 or more"),
        ({"code": float("nan")}, "weights are"),
        ({"code": float("inf")}, "weights are"),
        ({"code": 1e308, "python": 1e308}, "weights are"),
        ({"code": 0}, "not 0 for all"),
        ({}, "not 0 for all"),
    ],
)
def test_weights_that_mean_nothing(weights: dict[str, float], message: str) -> None:
    with pytest.raises(SaliencyError, match=message):
        small_table().score("gate", weights)


def test_an_unknown_criterion() -> None:
    with pytest.raises(SaliencyError, match="'magic'; there are reap_sum, reap_mean"):
        small_table().score("magic")


# Merging


def other_table(**changes: Any) -> SaliencyTable:
    stated = {"corpora": ("chinese", "german"), "samples": samples_of("b", "c")}
    return small_table(9, **stated | changes)


def test_merged_tables_hold_both() -> None:
    one, other = small_table(), other_table()
    merged = one.merge(other)
    assert merged.corpora == ("code", "python", "chinese", "german")
    assert merged.tokens.tolist() == [40, 20, 40, 20]
    for part, names in ((one, one.corpora), (other, other.corpora)):
        weights = dict(zip(names, (1, 3), strict=True))
        for criterion in CRITERIA:
            found = merged.score(criterion, weights)
            assert np.array_equal(found, part.score(criterion, weights))
    assert merged.samples["document_hashes"] == ["a", "b", "c"]
    assert merged.samples["fingerprint"] not in ("of a b", "of b c")


def test_the_order_of_merging_does_not_matter() -> None:
    one, other = small_table(), other_table()
    third = other_table(corpora=("x", "y"), samples=samples_of("d"))
    left, right = one.merge(other).merge(third), one.merge(other.merge(third))
    assert left.digest == right.digest
    assert left.samples == third.merge(other).merge(one).samples


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"source": {"config": "c0ffee", "weights": "cafe"}},
            "source is .* in the other",
        ),
        ({"corpora": ("python", "german")}, "corpus python is in both tables"),
        ({"samples": samples_of("c", tokenizer="x")}, "different tokenizers"),
    ],
)
def test_tables_that_cannot_be_merged(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SaliencyError, match=message):
        small_table().merge(other_table(**changes))


def test_tables_of_other_layers_cannot_be_merged() -> None:
    other = other_table()
    moved = with_changed(other, layers=other.layers + 1)
    with pytest.raises(SaliencyError, match="layers is .1 2 4. in one, .2 3 5. in the"):
        small_table().merge(moved)


def test_ranges() -> None:
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"
    assert ranges([]) == ""
