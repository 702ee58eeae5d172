"""An evaluation = float64 loops over the logits of two whole models."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from evaluation_cases import Case, logits_of, loops, samples_for, samples_of, write_case
from loading import load_float32

import kimi_k3
from kimi_k3.build.samples import Samples, load_tokenizer
from kimi_k3.evaluation import judging
from kimi_k3.evaluation.evaluate import compare, evaluate, make_teacher
from kimi_k3.evaluation.evaluation import Evaluation
from kimi_k3.evaluation.final_states import FinalStates
from kimi_k3.evaluation.scored import Scored

NUMBERS = ("kl", "teacher_nll", "build_nll")

#: A streamed pass and a whole model differ in their last bits: nats.
BITS = 1e-5

#: A model and itself; other rows beside a row; other blocks: nats.
SAME, BATCH = 1e-7, 1e-6


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def found(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Evaluation:
    """The build against its source, in float32."""
    out = tmp_path_factory.mktemp("found") / "out"
    return run(case, out)


def run(case: Case, out: Path, **changes: Any) -> Evaluation:
    settings: dict[str, Any] = {"samples": case.samples, "float32": True, **changes}
    return evaluate(case.build, case.source, out, **settings)


def of_documents(found: Evaluation) -> dict[int, list[float]]:
    """KLs of each document, in the order of its tokens."""
    kls: dict[int, list[float]] = {}
    for document, kl in zip(found.document.tolist(), found.kl.tolist(), strict=True):
        kls.setdefault(document, []).append(kl)
    return kls


def test_every_prediction_is_that_of_the_loops(case: Case, found: Evaluation):
    whole = [
        logits_of(load_float32(folder), case.samples)
        for folder in (case.source, case.build)
    ]
    tokenizer = load_tokenizer(case.source)
    want = loops(case.samples, tokenizer, whole[0], whole[1])
    for name in NUMBERS:
        np.testing.assert_allclose(
            getattr(found, name), want[name], rtol=1e-5, atol=BITS, err_msg=name
        )
    assert found.agrees.tolist() == want["agrees"].tolist()
    assert 0.1 < found.agrees.mean() < 0.9
    # Broken twins: the other direction, and the predictions of one token further on.
    back = loops(case.samples, tokenizer, whole[1], whole[0])
    assert np.abs(found.kl - back["kl"]).max() > 0.1
    assert np.abs(found.kl[1:] - want["kl"][:-1]).max() > 0.1
    assert np.abs(found.build_nll - want["teacher_nll"]).max() > 0.1


def test_direction(case: Case, found: Evaluation, tmp_path: Path):
    """KL(A || B) is not KL(B || A), and each says which it is."""
    back = evaluate(
        case.source, case.build, tmp_path / "out", samples=case.samples, float32=True
    )
    assert abs(back.kl.mean() - found.kl.mean()) > 1e-3
    assert (back.teacher_nll == found.build_nll).all()
    assert (back.build_nll == found.teacher_nll).all()
    assert found.about["direction"] == "KL(teacher || build)"
    assert found.about["teacher"]["path"] == str(case.source)
    assert found.about["build"]["path"] == str(case.build)
    assert back.about["teacher"] == {
        key: found.about["build"][key] for key in back.about["teacher"]
    }
    assert found.about["build"]["made_from_teacher"] is True
    assert back.about["build"]["made_from_teacher"] is None


@pytest.mark.parametrize("float32", [False, True])
def test_a_model_and_itself(case: Case, float32: bool, tmp_path: Path):
    settings: dict[str, Any] = {"samples": case.samples, "float32": float32}
    same = evaluate(case.source, case.source, tmp_path / "out", **settings)
    assert same.kl.max() <= SAME
    assert same.agrees.all()
    assert (same.teacher_nll == same.build_nll).all()
    # Through a teacher that was kept, and of another copy of the files.
    make_teacher(case.source, case.samples, tmp_path / "t", float32=float32)
    again = evaluate(case.source, tmp_path / "t", tmp_path / "again")
    assert again.kl.max() <= SAME


def test_a_teacher_that_was_kept_gives_the_same(
    case: Case, found: Evaluation, tmp_path: Path
):
    """One teacher for many builds, and one made on the way."""
    teacher = make_teacher(case.source, case.samples, tmp_path / "t", float32=True)
    assert isinstance(teacher, FinalStates)
    kept = evaluate(case.build, tmp_path / "t", tmp_path / "out")
    assert kept.digest == found.digest
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["predictions.npz"]


def test_batches(case: Case, found: Evaluation, tmp_path: Path):
    """B57: batch 1 and 4 give the same numbers, and so does all at once."""
    for rows in (4, 5):
        other = run(case, tmp_path / f"{rows}", rows_per_step=rows)
        for name in NUMBERS:
            difference = np.abs(getattr(other, name) - getattr(found, name)).max()
            # Of a log-likelihood of 14, the last bit is 1e-6.
            assert difference <= BATCH * max(1, getattr(found, name).max()), name


def test_blocks_change_no_bit(
    case: Case, found: Evaluation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for block, part in ((64, 7), (17, 17), (1024, 1)):
        with monkeypatch.context() as patch:
            patch.setattr(judging, "BLOCK", block)
            patch.setattr(judging, "PART", part)
            other = run(case, tmp_path / f"{block}-{part}")
        for name in NUMBERS:
            difference = np.abs(getattr(other, name) - getattr(found, name)).max()
            assert difference <= BATCH, (block, part, name)
        if block >= 64:
            assert other.digest == found.digest


def test_rows_in_another_order(case: Case, tmp_path: Path):
    """Each document a row: its numbers are the same bits wherever it stands."""
    rng = np.random.default_rng(4)
    tokens = rng.integers(0, 256, (6, 12))
    documents = np.repeat(np.arange(6)[:, None], 12, axis=1)
    order = [4, 0, 5, 2, 1, 3]
    plain = run(
        case, tmp_path / "a", samples=samples_of(case.source, tokens, documents)
    )
    moved = samples_of(case.source, tokens[order], documents[order])
    other = run(case, tmp_path / "b", samples=moved)
    assert of_documents(other) == of_documents(plain)
    assert other.kl.tolist() != plain.kl.tolist()
    wrong = samples_of(case.source, tokens[order], documents)
    broken = run(case, tmp_path / "c", samples=wrong)
    assert of_documents(broken) != of_documents(plain)


def test_the_same_each_time(case: Case, found: Evaluation, tmp_path: Path):
    again = run(case, tmp_path / "out")
    again.save(tmp_path)
    found.save(tmp_path / "out")
    first, second = (p / "predictions.npz" for p in (tmp_path, tmp_path / "out"))
    assert first.read_bytes() == second.read_bytes()


def test_memory_that_holds_nothing(case: Case, found: Evaluation, tmp_path: Path):
    assert run(case, tmp_path / "out", memory_limit=0).digest == found.digest


def test_what_is_judged(case: Case, found: Evaluation):
    """Not what begins a document or a row: 75 tokens, 8 documents, 5 rows."""
    begins = {0} | {int(e) for e in np.cumsum([9, 12] * 4) if e < 75}
    begins |= {16 * row for row in range(5)}
    assert len(found.kl) == 75 - len(begins)
    scored = Scored.of(case.samples, load_tokenizer(case.source))
    places = scored.rows * 16 + scored.columns + 1
    assert set(places.tolist()) == set(range(75)) - begins


def test_a_row_of_one_token_and_a_document_of_one(case: Case, tmp_path: Path):
    """Rows of one token have nothing to predict; a document of one token neither."""
    one = np.zeros((3, 1), int)
    with pytest.raises(ValueError, match="nothing to predict"):
        run(case, tmp_path / "one", samples=samples_of(case.source, one, one))
    tokens = np.array([[5, 6, 7, 8]])
    documents = np.array([[0, 1, 2, 2]])
    few = run(
        case, tmp_path / "few", samples=samples_of(case.source, tokens, documents)
    )
    assert few.document.tolist() == [2]
    assert few.position.tolist() == [1]


def test_comparing_states_of_other_samples(case: Case, tmp_path: Path):
    teacher = make_teacher(case.source, case.samples, tmp_path / "a")
    other = make_teacher(case.source, samples_for(case.source, rows=2), tmp_path / "b")
    with pytest.raises(ValueError, match="other samples"):
        compare(teacher, other)
    alone = compare(teacher, teacher)
    assert dict(alone.about) == {"direction": "KL(teacher || build)"}


def test_progress(case: Case, tmp_path: Path):
    layers: dict[str, list[Any]] = {"teacher": [], "build": []}
    judged: list[tuple[int, int]] = []
    run(
        case,
        tmp_path / "out",
        progress=lambda what: layers[what].append,
        judged=lambda done, total: judged.append((done, total)),
    )
    for shown in layers.values():
        done = [at for at in shown if at.finished]
        assert [at.layer for at in done] == [0, 1, 2]
        assert len(shown) == 3 * (5 + 1)
        bytes_done = [at.bytes_done for at in shown]
        assert bytes_done == sorted(bytes_done)
        assert done[-1].bytes_left == 0 < shown[0].bytes_left
    assert judged[-1][0] == judged[-1][1] == 63


def test_public_names():
    assert kimi_k3.__getattr__("evaluate") is evaluate
    assert kimi_k3.make_teacher is make_teacher


def test_wide_heads_are_compared_in_parts(case: Case, tmp_path: Path, monkeypatch: Any):
    """No more than a block's logits are in memory, however many predictions."""
    monkeypatch.setattr(judging, "BLOCK", 8)
    most = 0
    real = judging.divergences

    def seen(a: mx.array, b: mx.array, targets: np.ndarray) -> Any:
        nonlocal most
        most = max(most, len(a))
        return real(a, b, targets)

    monkeypatch.setattr(judging, "divergences", seen)
    run(case, tmp_path / "out")
    assert most == 8


def test_samples_keep_their_part(case: Case, tmp_path: Path):
    kept: Samples = replace(case.samples, part="all")
    teacher = make_teacher(case.source, kept, tmp_path / "t", part="all")
    found = evaluate(case.build, teacher.folder, tmp_path / "out")
    assert found.about["samples"] == {
        "part": "all",
        "rows": 5,
        "length": 16,
        "documents": 8,
    }
