"""B57: figures that would not be comparable are refused, before any weight is read."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from damage import copy_folder
from evaluation_cases import Case, samples_for, samples_of, write_case
from small_builds import patch
from tiny_k3 import write_t1
from tokenizer_folders import edit_json

from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.samples import Samples
from kimi_k3.conversion.convert import convert
from kimi_k3.errors import (
    ChangedShardError,
    CheckpointError,
    EvaluationError,
    KimiK3Error,
    NotFiniteError,
    OverlapError,
    SamplesError,
)
from kimi_k3.evaluation.evaluate import evaluate, make_teacher
from kimi_k3.evaluation.head import Head
from kimi_k3.evaluation.summary import Summary
from kimi_k3.planning.expert_plan import ExpertPlan


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return write_case(tmp_path_factory.mktemp("case"))


@pytest.fixture(scope="module")
def teacher(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher") / "teacher"
    make_teacher(case.source, case.samples, out)
    return out


@pytest.fixture(scope="module")
def calibrated(case: Case) -> Samples:
    """Samples of other documents than those that are judged by, but for one."""
    samples = samples_of(
        case.source, np.arange(40).reshape(2, 20), np.repeat([[0], [1]], 20, axis=1)
    )
    hashes = ("a" * 32, case.samples.document_hashes[3])
    return replace(samples, part="calibration", document_hashes=hashes)


@pytest.fixture(scope="module")
def calibration(
    case: Case, calibrated: Samples, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Of documents that are not judged by."""
    out = tmp_path_factory.mktemp("calibration") / "cal"
    hashes = ("a" * 32, "b" * 32)
    calibrate(case.source, replace(calibrated, document_hashes=hashes), out)
    return out


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a weight fails the test."""

    def read(*_: object) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(LayerStream, "_loaded", read)
    monkeypatch.setattr(LayerStream, "layers", read)


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """A folder for results that nothing is left in."""
    path = tmp_path / "out"
    yield path
    assert not path.exists()


@pytest.mark.usefixtures("no_weights")
class TestB57:
    """Refused before hours of work; nothing is left behind."""

    def test_another_tokenizer(self, case: Case, teacher: Path, out: Path):
        other = replace(case.samples, tokenizer="0" * 64)
        for against, given in ((case.source, other), (teacher, other)):
            with pytest.raises(KimiK3Error, match="other samples|another tokenizer"):
                evaluate(case.build, against, out, samples=given)
        with pytest.raises(EvaluationError, match="made with another tokenizer"):
            make_teacher(case.source, other, out)
        other.save(out.with_suffix(".npz"))
        with pytest.raises(SamplesError, match="made with another tokenizer"):
            make_teacher(case.source, out.with_suffix(".npz"), out)

    @pytest.mark.parametrize("change", ["vocabulary", "control-names", "control-ids"])
    def test_other_token_files(
        self, case: Case, teacher: Path, change: str, out: Path, tmp_path: Path
    ):
        """The config agrees, the ids mean other text."""
        build = copy_folder(case.build, tmp_path / "build")
        if change == "vocabulary":
            path = build / "tiktoken.model"
            lines = path.read_text().splitlines()
            words = [line.split()[0] for line in lines]
            words[-1], words[-2] = words[-2], words[-1]
            ids = [line.split()[1] for line in lines]
            path.write_text(
                "".join(f"{w} {i}\n" for w, i in zip(words, ids, strict=True))
            )
        else:

            def edit(config: dict[str, Any]) -> None:
                added = config["added_tokens_decoder"]
                first, second = sorted(added, key=int)[3:5]
                if change == "control-names":
                    added[first]["content"] = "<|begin|>"
                else:
                    added[first], added[second] = added[second], added[first]

            edit_json(build / "tokenizer_config.json", edit)
        for against, given in ((teacher, None), (case.source, case.samples)):
            with pytest.raises(KimiK3Error, match="tokenizer"):
                evaluate(build, against, out, samples=given)

    def test_another_vocabulary(
        self, case: Case, teacher: Path, out: Path, tmp_path: Path
    ):
        wide = write_t1(tmp_path / "wide", tokenizer=True, vocab_size=640)
        said = "the teacher tells 576 tokens apart and the build 640"
        for against, given in ((teacher, None), (case.source, case.samples)):
            with pytest.raises(EvaluationError, match=said):
                evaluate(wide, against, out, samples=given)

    def test_ids_that_the_model_has_not(self, case: Case, out: Path):
        tokens = case.samples.tokens.copy()
        tokens[0, 3] = 576
        with pytest.raises(EvaluationError, match="token id 576"):
            make_teacher(case.source, replace(case.samples, tokens=tokens), out)

    def test_text_that_was_calibrated_on(
        self,
        case: Case,
        teacher: Path,
        calibration: Path,
        calibrated: Samples,
        out: Path,
        tmp_path: Path,
    ):
        """A build's calibration saw one of the eight documents."""
        table = SaliencyTable.load(calibration)
        seen = {**table.samples, "document_hashes": list(calibrated.document_hashes)}
        replace(table, samples=seen).save(tmp_path / "cal.npz")
        for against, given in ((teacher, None), (case.source, case.samples)):
            with pytest.raises(OverlapError, match="1 of 8 documents"):
                evaluate(
                    case.build,
                    against,
                    out,
                    samples=given,
                    calibration=tmp_path / "cal.npz",
                )
        with pytest.raises(KimiK3Error, match="is not there"):
            evaluate(case.build, teacher, out, calibration=tmp_path / "no.npz")

    def test_the_part_that_calibrations_use(
        self, case: Case, teacher: Path, out: Path, tmp_path: Path
    ):
        """Refused unless it is asked for by name; then the result says so."""
        samples = replace(case.samples, part="calibration")
        samples.save(tmp_path / "s.npz")
        for given in (samples, tmp_path / "s.npz"):
            with pytest.raises(SamplesError, match="part 'calibration'"):
                make_teacher(case.source, given, out)
            with pytest.raises(SamplesError, match="part 'calibration'"):
                evaluate(case.build, case.source, out, samples=given)
        with pytest.raises(
            EvaluationError, match="of the part 'held_out', not of 'all"
        ):
            evaluate(case.build, teacher, out, part="all")

    def test_a_teacher_of_other_samples(
        self, case: Case, teacher: Path, out: Path, tmp_path: Path
    ):
        other = samples_for(case.source, rows=2)
        with pytest.raises(EvaluationError, match="other samples than those given"):
            evaluate(case.build, teacher, out, samples=other)
        other.save(tmp_path / "other.npz")
        with pytest.raises(EvaluationError, match=r"other samples than .*other\.npz"):
            evaluate(case.build, teacher, out, samples=tmp_path / "other.npz")

    def test_a_teacher_in_another_type_or_batch(
        self, case: Case, teacher: Path, out: Path
    ):
        with pytest.raises(EvaluationError, match="computed with --dtype stored"):
            evaluate(case.build, teacher, out, float32=True)
        with pytest.raises(EvaluationError, match="with 1 rows a step, not 4"):
            evaluate(case.build, teacher, out, rows_per_step=4)

    def test_no_samples(self, case: Case, out: Path):
        with pytest.raises(EvaluationError, match="name samples to judge by"):
            evaluate(case.build, case.source, out)
        with pytest.raises(KimiK3Error, match="no shipped mix"):
            evaluate(case.build, case.source, out, samples="no-such-mix")

    def test_folders_that_are_no_checkpoint(
        self, case: Case, teacher: Path, out: Path, tmp_path: Path
    ):
        said = "holds final hidden states, not a checkpoint"
        with pytest.raises(EvaluationError, match=f"{said}.*not a build"):
            evaluate(teacher, case.source, out, samples=case.samples)
        with pytest.raises(EvaluationError, match=f"{said}.*not a source"):
            make_teacher(teacher, case.samples, out)
        (tmp_path / "empty").mkdir()
        for empty in (tmp_path / "absent", tmp_path / "empty"):
            with pytest.raises(KimiK3Error, match=empty.name):
                evaluate(case.build, empty, out, samples=case.samples)
            with pytest.raises(KimiK3Error, match=empty.name):
                evaluate(empty, teacher, out)

    def test_an_evaluation_in_place_of_its_teacher(
        self, case: Case, teacher: Path, out: Path
    ):
        said = "holds an evaluation, whose teacher is .*teacher: name that"
        with pytest.raises(EvaluationError, match=said):
            evaluate(case.build, teacher.parent, out)

    def test_results_inside_what_is_only_read(self, case: Case, teacher: Path):
        samples = case.samples
        for folder, what in ((case.build, "build"), (case.source, "teacher")):
            for place in (folder, folder / "quality", folder / "a" / ".." / "b"):
                with pytest.raises(EvaluationError, match=f"is the {what} and is only"):
                    evaluate(case.build, case.source, place, samples=samples)
                assert not (folder / "quality").exists()
        with pytest.raises(EvaluationError, match="is the teacher and is only read"):
            evaluate(case.build, teacher, teacher)
        with pytest.raises(EvaluationError, match="is the source and is only read"):
            make_teacher(case.source, samples, case.source / "teacher")

    def test_settings(self, case: Case, out: Path):
        refused: tuple[tuple[dict[str, Any], str], ...] = (
            ({"rows_per_step": 0}, "rows_per_step is 0"),
            ({"memory_limit": -1}, "memory_limit is -1"),
        )
        for settings, said in refused:
            with pytest.raises(EvaluationError, match=said):
                make_teacher(case.source, case.samples, out, **settings)
            with pytest.raises(EvaluationError, match=said):
                evaluate(case.build, case.source, out, samples=case.samples, **settings)

    def test_a_damaged_checkpoint(self, case: Case, teacher: Path, out: Path):
        build = copy_folder(case.build, out.parent / "short")
        shard = sorted(build.glob("*.safetensors"))[1]
        shard.write_bytes(shard.read_bytes()[:-10])
        with pytest.raises(CheckpointError, match=shard.name):
            evaluate(build, teacher, out)


@pytest.mark.usefixtures("no_weights")
def test_a_folder_of_another_evaluation(case: Case, teacher: Path, tmp_path: Path):
    """Each finished folder keeps what it has."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(EvaluationError, match=r"notes\.txt and no final states"):
        make_teacher(case.source, case.samples, out)
    with pytest.raises(EvaluationError, match="the samples' fingerprint was"):
        make_teacher(case.source, samples_for(case.source, rows=2), teacher)
    with pytest.raises(
        EvaluationError, match="computed in was 'stored' and is 'float32"
    ):
        make_teacher(case.source, case.samples, teacher, float32=True)
    with pytest.raises(EvaluationError, match="checkpoint's fingerprint was"):
        make_teacher(case.build, case.samples, teacher)
    assert sorted(path.name for path in out.iterdir()) == ["notes.txt"]


def test_a_result_of_another_pair(case: Case, teacher: Path, tmp_path: Path):
    out = tmp_path / "out"
    evaluate(case.build, teacher, out)
    before = (out / "predictions.npz").read_bytes()
    with pytest.raises(
        EvaluationError, match="of its build checkpoint, .*made_from_teach"
    ):
        evaluate(case.source, teacher, out)
    samples = samples_for(case.source, rows=2)
    with pytest.raises(EvaluationError, match="of its teacher samples, dtype differ"):
        evaluate(case.build, case.source, out, samples=samples, float32=True)
    assert (out / "predictions.npz").read_bytes() == before
    evaluate(case.source, teacher, out, restart=True)
    assert (out / "predictions.npz").read_bytes() != before


def test_other_values_in_equal_shapes(case: Case, teacher: Path, tmp_path: Path):
    """Neither a finished result nor layers that were run serve another build."""
    out = tmp_path / "out"
    evaluate(case.build, teacher, out)
    build = copy_folder(case.build, tmp_path / "build")
    shard = sorted(build.glob("*.safetensors"))[1]
    content = bytearray(shard.read_bytes())
    first = 8 + int.from_bytes(content[:8], "little")
    content[first] ^= 1
    shard.write_bytes(content)
    with pytest.raises(EvaluationError, match="of its build values differ"):
        evaluate(build, teacher, out)
    make_teacher(case.build, case.samples, tmp_path / "kept")
    with pytest.raises(EvaluationError, match="some of the checkpoint's values was"):
        make_teacher(build, case.samples, tmp_path / "kept")


def test_an_unfinished_teacher(case: Case, tmp_path: Path):
    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.finished:
            raise Stop

    folder, out = tmp_path / "teacher", tmp_path / "out"
    with pytest.raises(Stop):
        make_teacher(case.source, case.samples, folder, progress=stop)
    with pytest.raises(EvaluationError, match="is not finished. Start the command"):
        evaluate(case.build, folder, out)
    with pytest.raises(EvaluationError, match="not a checkpoint"):
        evaluate(folder, case.source, out, samples=case.samples)
    assert not out.exists()


def test_a_build_that_is_replaced_meanwhile(case: Case, teacher: Path, tmp_path: Path):
    """Another revision of the same name: seen at once, or when going on."""
    build, out = copy_folder(case.build, tmp_path / "build"), tmp_path / "out"

    def replaced(progress: Any) -> None:
        if progress.finished and progress.layer == 0:
            for path in build.glob("*.safetensors"):
                path.write_bytes(path.read_bytes() + bytes(8))

    with pytest.raises(ChangedShardError, match="safetensors"):
        evaluate(build, teacher, out, progress=lambda what: replaced)
    other = copy_folder(case.build, tmp_path / "other")
    edit_json(other / "config.json", lambda config: config.update(expert_top_p=0.9))
    with pytest.raises(EvaluationError, match="checkpoint's fingerprint was"):
        evaluate(other, teacher, out)
    assert evaluate(case.build, teacher, out).kl.max() > 0


NAN = {
    "layer-1": (
        "language_model.model.layers.1.self_attn.o_proj.weight",
        r"layer 1: self_attn\.o_proj\.weight holds NaN",
    ),
    "router": (
        "language_model.model.layers.2.mlp.gate.weight",
        r"layer 2: mlp\.gate\.weight holds NaN",
    ),
    "embedding": (
        "language_model.model.embed_tokens.weight",
        "the embedding gives NaN",
    ),
    "norm": ("language_model.model.norm.weight", "the final norm gives NaN"),
    "head": ("language_model.lm_head.weight", "the head: weight holds NaN"),
}


@pytest.mark.parametrize("where", NAN)
def test_nan_is_named(case: Case, teacher: Path, where: str, tmp_path: Path):
    name, said = NAN[where]
    build = copy_folder(case.build, tmp_path / "build")

    def spoil(raw: np.ndarray) -> None:
        raw.reshape(-1)[:4] = np.array([np.nan], np.float32).view(np.uint8)
        if where == "embedding":
            raw[:] = raw[0]

    patch(build, name, spoil)
    with pytest.raises(NotFiniteError, match=said):
        evaluate(build, teacher, tmp_path / "out")


def test_logits_that_overflow_are_refused(
    case: Case, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Head, "logits", lambda self, x: mx.full((len(x), 9), mx.inf))
    with pytest.raises(EvaluationError, match="kl holds NaN or infinity"):
        evaluate(case.build, teacher, tmp_path / "out")


def overlap(found: Any) -> str:
    return found.about["overlap"]


def test_what_is_said_of_overlap(
    case: Case, teacher: Path, calibration: Path, tmp_path: Path
):
    """The plan in the build's config names the calibration that it came from."""
    digest = SaliencyTable.load(calibration).digest
    said: list[str] = []
    plain = evaluate(case.build, teacher, tmp_path / "a", tell=said.append)
    assert overlap(plain) == "not checked: no calibration was named with --calibration"
    assert any("not checked" in line for line in said)
    named = write_case(tmp_path / "named", saliency=digest)
    found = evaluate(named.build, teacher, tmp_path / "b")
    assert overlap(found) == (
        f"not checked: the build was planned from the calibration {digest[:12]}, which "
        "was not named with --calibration"
    )
    # The numbers are there; looking again only says more.
    again = evaluate(named.build, teacher, tmp_path / "b", calibration=calibration)
    assert overlap(again) == (
        f"none with the calibration {digest[:12]}, which the build was planned from"
    )
    assert (again.kl == found.kl).all()
    other = write_case(tmp_path / "other", saliency="f" * 64)
    found = evaluate(other.build, teacher, tmp_path / "c", calibration=calibration)
    assert overlap(found) == (
        f"none with the calibration {digest[:12]}, but the build was planned from "
        "another one, ffffffffffff: overlap with that is not checked"
    )
    found = evaluate(case.build, teacher, tmp_path / "d", calibration=calibration)
    assert overlap(found).endswith("the build was planned from is not recorded")


def test_what_a_reader_must_know_is_told(
    case: Case, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said: list[str] = []
    samples = replace(case.samples, part="calibration")
    found = evaluate(
        case.build,
        case.source,
        tmp_path / "a",
        samples=samples,
        part="calibration",
        tell=said.append,
    )
    assert found.about["samples"]["part"] == "calibration"
    assert "these are samples of the part 'calibration'." in said
    unrelated = write_t1(tmp_path / "unrelated", tokenizer=True, seed=5)
    config = json.loads((unrelated / "config.json").read_text())
    plan = ExpertPlan.identity(LayerStream(unrelated).args)
    convert(unrelated, tmp_path / "foreign", plan)
    assert "conversion" not in config
    evaluate(tmp_path / "foreign", teacher, tmp_path / "b", tell=said.append)
    assert said[-1] == "the build was not converted from this teacher's checkpoint."
    monkeypatch.setattr("kimi_k3.evaluation.states_run.version", lambda name: "9.9")
    evaluate(case.build, teacher, tmp_path / "c", tell=said.append)
    assert said[-1] == (
        f"teacher and build were not computed alike (mlx: '{version('mlx')}' and '9.9')."
    )


def test_remarks_on_a_checkpoint_are_told(case: Case, tmp_path: Path):
    build = copy_folder(case.build, tmp_path / "build")
    edit_json(build / "config.json", lambda c: c["text_config"].update(unheard=1))
    said: list[str] = []
    make_teacher(build, case.samples, tmp_path / "out", tell=said.append)
    assert any("unheard" in line for line in said), said


def test_a_damaged_record_is_named(case: Case, teacher: Path, tmp_path: Path):
    build = copy_folder(case.build, tmp_path / "build")
    edit_json(build / "config.json", lambda c: c["conversion"].pop("kept"))
    with pytest.raises(EvaluationError, match="conversion in config.json is not whole"):
        evaluate(build, teacher, tmp_path / "out")


def test_a_strangers_summary_is_kept(case: Case, teacher: Path, tmp_path: Path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "evaluation.json").write_text("mine")
    with pytest.raises(EvaluationError, match=r"evaluation\.json, and no evaluation"):
        evaluate(case.build, teacher, out)
    assert (out / "evaluation.json").read_text() == "mine"


def test_a_restart_leaves_no_old_summary(case: Case, teacher: Path, tmp_path: Path):
    found = evaluate(case.build, teacher, tmp_path / "out")
    Summary.of(found, draws=2).save(tmp_path / "out")
    evaluate(case.build, teacher, tmp_path / "out", restart=True)
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_a_damaged_teacher_is_not_called_ready(case: Case, tmp_path: Path):
    folder = tmp_path / "teacher"
    make_teacher(case.source, case.samples, folder)
    content = bytearray((folder / "final.bin").read_bytes())
    content[5] ^= 1
    (folder / "final.bin").write_bytes(content)
    with pytest.raises(KimiK3Error, match=r"final\.bin"):
        make_teacher(case.source, case.samples, folder)
