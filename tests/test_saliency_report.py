"""The figures of a saliency report, its words, and ``kimi-k3 saliency``."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saliency_tables import big_table, record, small_table, table_of

from kimi_k3.build.retention import (
    global_counts,
    kept_by_layer,
    kept_globally,
    kept_uniformly,
    set_overlap,
    top_sets,
)
from kimi_k3.build.saliency import CRITERIA, SaliencyTable
from kimi_k3.build.saliency_checks import STATISTICS
from kimi_k3.build.saliency_report import SaliencyReport, saliency_report
from kimi_k3.build.saliency_text import sparkline
from kimi_k3.cli import main
from kimi_k3.errors import SaliencyError

SHARES = np.linspace(0, 1, 21)


def counted_table(*layers: list[int]) -> SaliencyTable:
    """Experts, top-1, that differ only in how often each is chosen."""
    recorded = {}
    for index, counts in enumerate(layers):
        count = np.array(counts)
        sums = {name: count.astype(dtype) for name, dtype in STATISTICS.items()}
        sums["contribution_max"] = (count > 0).astype(float)
        recorded[index] = [sums]
    return table_of(recorded, tokens=[sum(layers[0])], top_k=1)


@pytest.fixture(scope="module")
def big() -> SaliencyTable:
    return big_table()


@pytest.fixture(scope="module")
def big_report(big: SaliencyTable) -> SaliencyReport:
    return saliency_report(big)


# Retention


def test_curves_worked_out_by_hand() -> None:
    score = np.array([[1.0, 4, 0, 3], [6, 1, 1, 0]])  # the second layer has three
    experts = np.array([4, 3])
    kept = np.array([0, 0.25, 1 / 3, 0.5, 1])
    by_layer = kept_by_layer(score, experts, kept)
    assert by_layer[0] == pytest.approx([0, 4 / 8, 5 / 8, 7 / 8, 1])
    assert by_layer[1] == pytest.approx([0, 0.75 * 6 / 8, 6 / 8, 6.5 / 8, 1])
    assert kept_uniformly(score, experts, kept) == pytest.approx(by_layer.mean(axis=0))
    # All seven together, in eighths of a layer: 6, 4, 3, 1, 1, 1, 0.
    whole = kept_globally(score, experts, np.arange(8) / 7)
    assert whole * 16 == pytest.approx([0, 6, 10, 13, 14, 15, 16, 16])
    assert global_counts(score, experts, 3 / 7).tolist() == [2, 1]


def test_scale_of_a_layer_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    score, experts = rng.random((3, 8)), np.full(3, 8)
    scaled = score * np.array([[1], [1000], [0.001]])
    for curve in (kept_uniformly, kept_globally):
        assert curve(scaled, experts, SHARES) == pytest.approx(
            curve(score, experts, SHARES)
        )


@pytest.mark.parametrize("seed", range(20))
def test_what_holds_for_every_curve(seed: int) -> None:
    rng = np.random.default_rng(seed)
    experts = rng.integers(1, 12, 5)
    score = rng.exponential(size=(5, 11)) ** rng.integers(1, 4)
    score *= np.arange(11) < experts[:, None]
    score[0, 0] = 1
    by_layer = kept_by_layer(score, experts, SHARES)
    uniform = kept_uniformly(score, experts, SHARES)
    ranked = kept_globally(score, experts, SHARES)
    for curve in (*by_layer, uniform, ranked):
        assert np.isfinite(curve).all()
        assert curve[0] == 0
        assert curve[-1] == pytest.approx(1)
        assert (np.diff(curve) >= 0).all()
        assert (curve >= SHARES - 1e-12).all()
    assert (ranked >= uniform - 1e-12).all()
    for share in SHARES:
        total = global_counts(score, experts, share).sum()
        assert total == int(np.floor(share * experts.sum() + 0.5 + 1e-9))


def test_overlap_of_random_sets_is_chance() -> None:
    rng = np.random.default_rng(0)
    experts = np.full(40, 100)
    sets = np.stack([top_sets(rng.random((40, 100)), experts, 0.27) for _ in range(3)])
    overlap, chance = set_overlap(sets, experts)
    assert chance == pytest.approx(np.full((3, 3), 0.27))
    assert np.diag(overlap) == pytest.approx(1)
    assert np.abs(overlap - 0.27)[~np.eye(3, dtype=bool)].max() < 0.03


def test_overlap_worked_out_by_hand() -> None:
    sets = np.zeros((2, 2, 4), bool)
    sets[0, 0, [0, 1]] = sets[1, 0, [1, 2]] = True  # one of two
    sets[0, 1, [0, 1]] = sets[1, 1, [1]] = True  # the smaller lies in the larger
    overlap, chance = set_overlap(sets, np.array([4, 4]))
    assert overlap.tolist() == [[1, 0.75], [0.75, 1]]
    assert chance.tolist() == [[0.5, 0.5], [0.5, 0.375]]


def test_experts_without_saliency_are_never_among_the_top() -> None:
    score = np.array([[0, 0, 0, 5.0]])
    assert top_sets(score, np.array([4]), 0.75).tolist() == [[False] * 3 + [True]]


# Figures


def test_the_figures_of_a_layer() -> None:
    table = counted_table([12, 0, 4, 0], [4, 4, 4, 4])
    report = saliency_report(table, top=0.5)
    first, flat = report.layers
    assert (first.top_quarter, first.top) == (0.75, 1)
    assert first.never_chosen == (1, 3)
    assert first.busiest == 3
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    assert first.evenness == pytest.approx(entropy)
    assert not first.unprunable
    assert (flat.top_quarter, flat.busiest, flat.never_chosen) == (0.25, 1, ())
    assert flat.evenness == pytest.approx(1)
    assert flat.unprunable == "flat: the less salient half holds 50% of its saliency"


def test_a_layer_that_keeps_what_the_router_picks() -> None:
    table = counted_table([14, 2, 2, 2], [20])
    assert [bool(layer.unprunable) for layer in saliency_report(table).layers] == [0, 1]
    few = saliency_report(table).layers[1].unprunable
    assert few == "its experts are 1 and the router picks 1"


def test_never_chosen_is_about_the_weighted_corpora() -> None:
    rng = np.random.default_rng(0)
    some, other = record(rng, 30, 8, 2), record(rng, 30, 8, 2)
    for name in STATISTICS:  # the other corpus: the same experts, one along
        other[name] = np.roll(some[name], 1)
    while (some["count"] == 0).sum() < 2:
        some = record(rng, 8, 8, 2)
    tokens = (int(some["count"].sum()) // 2, 30)
    table = table_of({1: [some, other]}, tokens=tokens)
    unused = np.flatnonzero(some["count"] == 0)
    alone = saliency_report(table, weights={"code": 1}).layers[0]
    assert alone.never_chosen == tuple(unused)
    both = saliency_report(table, weights={"code": 1, "python": 1}).layers[0]
    assert set(both.never_chosen) == set(unused) & set(
        np.flatnonzero(other["count"] == 0)
    )


def test_a_thin_corpus_is_named() -> None:
    report = saliency_report(small_table())
    assert report.thin == {"python": 40}  # 8 experts × 10 choices / top-2
    assert "python has 20 tokens, too few to rank experts by" in report.text()
    assert "calibrate on 40 or more" in report.text()


def test_a_table_like_the_release(big_report: SaliencyReport) -> None:
    tops = [layer.top for layer in big_report.layers if layer.layer != 4]
    assert 0.5 < np.median(tops) < 0.65
    assert [layer.layer for layer in big_report.layers if layer.unprunable] == [4]
    never = {layer.layer: layer.never_chosen for layer in big_report.layers}
    assert {k: v for k, v in never.items() if v} == {6: (7, 11, 12)}
    overlap = np.array(big_report.overlap)
    assert np.array(big_report.chance) == pytest.approx(0.27, abs=1e-3)
    code, python, english, chinese, german = range(5)
    assert overlap[code, python] > 0.5 < overlap[english, german]
    assert overlap[code, chinese] < 0.27
    assert overlap == pytest.approx(overlap.T)
    assert big_report.top_uniform <= big_report.top_ranked
    assert big_report.starved == (4,)
    assert not big_report.thin


def test_starved_layers_are_those_with_fewer_than_the_router_picks(
    big: SaliencyTable, big_report: SaliencyReport
) -> None:
    score = big.score("reap_sum")
    shares = score / score.sum(axis=1, keepdims=True)
    limit = np.sort(shares.ravel())[-round(0.27 * shares.size)]
    left = (shares >= limit).sum(axis=1)
    assert big_report.starved == tuple(big.layers[left < 16])


@pytest.mark.parametrize("criterion", CRITERIA)
def test_every_criterion_gives_finite_figures(criterion: str) -> None:
    report = saliency_report(small_table(), criterion=criterion)
    assert criterion in report.text()
    json.dumps(report.to_dict(), allow_nan=False)


def test_weights_change_the_figures(big: SaliencyTable) -> None:
    weighted = saliency_report(big, weights={"code": 7, "chinese": 3})
    assert weighted.weights == {
        "code": 0.7,
        "python": 0,
        "english": 0,
        "chinese": 0.3,
        "german": 0,
    }
    alone = saliency_report(big, weights={"code": 1})
    # One corpus concentrates more than two that need other experts.
    assert np.median([layer.top for layer in alone.layers]) > np.median(
        [layer.top for layer in weighted.layers]
    )
    assert alone.overlap == weighted.overlap


def test_full_size_is_quick(big: SaliencyTable) -> None:
    started = time.process_time()
    saliency_report(big).text()
    assert time.process_time() - started < 5  # of the processor; about 0.2 s


@pytest.mark.parametrize("top", [0, 1, -0.1, 27, float("nan")])
def test_a_share_that_cannot_be(top: float) -> None:
    with pytest.raises(SaliencyError, match="top is .*above 0 and below 1"):
        saliency_report(small_table(), top=top)


@pytest.mark.parametrize(("top", "starved"), [(0.25, (1,)), (0.375, ()), (0.5, ())])
def test_a_layer_starves_below_what_the_router_picks(
    top: float, starved: tuple[int, ...]
) -> None:
    # Shares of a half in layer 0, of a quarter in layer 1: it keeps 0, 1, then 2.
    report = saliency_report(counted_table([8, 8, 0, 0], [4, 4, 4, 4]), top=top)
    assert report.starved == starved
    warned = "ranked over all layers, the top" in report.text()
    assert warned == bool(starved)


# Words


def test_the_text_fits_a_terminal(big_report: SaliencyReport) -> None:
    lines = big_report.text().splitlines()
    rows = [line for line in lines if line.strip().split(" ")[0].isdigit()]
    assert len(rows) == 92
    assert all(len(row) <= 80 for row in rows)
    assert max(map(len, lines)) <= 100
    text = big_report.text()
    for part in (
        "82,432 experts in 92 layers, the router picks 16; 131,070 tokens",
        "chance gives 27%",
        "never chosen    3 of 82,432 experts, in 1 layer\n",
        "layer 6: 7, 11-12",
        "cannot prune !  layer 4: flat",
        "leave fewer than 16 experts in layer 4",
    ):
        assert part in text


def test_a_single_corpus_has_no_overlap() -> None:
    text = saliency_report(counted_table([12, 0, 4, 0])).text()
    assert "overlap" not in text
    assert "in 1 layer" in text


def test_many_layers_without_tokens_are_cut_short() -> None:
    text = saliency_report(counted_table(*[[12, 0, 4, 0]] * 20)).text()
    assert "never chosen    40 of 80 experts, in 20 layers" in text
    assert "and in 8 layers more (--json lists all)" in text


def test_sparkline() -> None:
    assert sparkline([0, 0.5, 0.99, 1, -1, 2]) == "▁▅██▁█"


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[object, str, str]:
    code = main(["saliency", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_verb_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = small_table()
    file = table.save(tmp_path)
    assert run(capsys, tmp_path) == (0, saliency_report(table).text() + "\n", "")
    assert run(capsys, file) == run(capsys, tmp_path)


def test_the_verb_weighs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = small_table()
    table.save(tmp_path)
    options = ["--weight", "code=0.7", "--weight", "python=0.3", "--top", 0.5]
    code, out, _ = run(capsys, tmp_path, *options, "--criterion", "gate", "--json")
    wanted = saliency_report(
        table, criterion="gate", weights={"code": 0.7, "python": 0.3}, top=0.5
    )
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(wanted.to_dict()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weight", "german=1"], "has no corpus german; it has code, python"),
        (
            ["--weight", "code=1", "--weight", "code=2"],
            "names a corpus twice: code, code",
        ),
        (["--weight", "code=-1"], "weights are"),
        (["--criterion", "magic"], "no criterion is called 'magic'"),
        (["--top", "27"], "top is 27.0"),
    ],
)
def test_what_the_verb_refuses(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    small_table().save(tmp_path)
    code, out, err = run(capsys, tmp_path, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["code", "=1", "code=much"])
def test_weights_of_the_wrong_form(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["saliency", str(tmp_path), "--weight", text])
    assert stop.value.code == 2
    assert "--weight" in capsys.readouterr().err


def test_an_unfinished_calibration_is_to_be_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calibration.json").write_text("{}")
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "not finished. Start the same" in err
    small_table().save(tmp_path)
    assert run(capsys, tmp_path)[0] == 0


def test_a_damaged_table_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, tmp_path)
    assert (code, err.startswith("error: ")) == (2, True)
    file = small_table().save(tmp_path)
    file.write_bytes(file.read_bytes()[:-7])
    code, _, err = run(capsys, tmp_path)
    assert code == 2
    assert "damaged" in err
