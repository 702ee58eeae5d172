"""kimi-k3 generation from end to end: known rates, resumed bytes, refusals by name."""

import json
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_answers import (
    TOKENIZER,
    ScriptedModel,
    conversation,
    looping,
    marked,
    write_chats,
)

from kimi_k3.answers import generation as module
from kimi_k3.answers.answers import FILE_NAME as ANSWERS
from kimi_k3.answers.answers import AnswerFile
from kimi_k3.answers.generation import generation, refuse_too_large
from kimi_k3.answers.generation_prompts import read_prompts
from kimi_k3.answers.generation_report import FILE_NAME, Generation
from kimi_k3.answers.generation_run import seed_of
from kimi_k3.checkpoint.values_digest import values_digest
from kimi_k3.cli import main
from kimi_k3.errors import EvaluationError, MissingPackageError
from kimi_k3.evaluation.statistics import Bootstrap
from kimi_k3.folder_check import open_folder
from kimi_k3.machine.hardware import read_machine
from kimi_k3.nano import NANO_FOLDER

NANO = str(NANO_FOLDER)
TOOL = {"name": "now", "parameters": {"type": "object", "additionalProperties": False}}
END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
SAID = f"Well.<|close|>think<|sep|><|open|>response<|sep|>The answer is so simple.{END}"
CALLED = (
    "Well.<|close|>think<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="{}" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    "<|close|>message<|sep|><|end_of_msg|>"
)


def script(folder: Path, answers: list[list[int]], tools: Any = None) -> Path:
    """Chats whose n-th prompt, as they are read, has the n-th answer; see `speak`."""
    lines = [conversation(f"Is question {n} easy?", tools) for n in range(len(answers))]
    return write_chats(folder / "chats.jsonl", lines)


def speak(
    monkeypatch: pytest.MonkeyPatch, chats: Path, answers: list[list[int]]
) -> ScriptedModel:
    """Make ``load`` give a model that says ``answers``."""
    prompts = read_prompts(chats, TOKENIZER).prompts
    spoken = {p.ids: said for p, said in zip(prompts, answers, strict=True)}
    model = ScriptedModel(spoken, len(TOKENIZER))
    load = module.load

    def loaded(folder: Path) -> Any:
        return model, load(folder)[1]

    monkeypatch.setattr(module, "load", loaded)
    return model


def run(chats: Path, out: Path, *options: str) -> int:
    arguments = ["generation", NANO, "--prompts", str(chats), "--out", str(out)]
    done = main([*arguments, "--max-tokens", "200", *options])
    assert isinstance(done, int)
    return done


def prose(start: int, length: int) -> list[int]:
    """English that goes on; no loop."""
    return looping(start, 1, length, 0).ids


TEN = [
    *(looping(n, (1, 7, 20)[n], 20 + n, 300).ids for n in range(3)),
    *[marked(SAID)] * 6,
    prose(9, 250),
]


def test_three_of_ten_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    chats = script(tmp_path, TEN)
    speak(monkeypatch, chats, TEN)
    assert run(chats, tmp_path / "out", "--setting", "greedy", "--json") == 0
    assert (
        json.loads(capsys.readouterr().out)
        == Generation.load(tmp_path / "out").to_dict()
    )
    row = Generation.load(tmp_path / "out").settings["greedy"].overall
    assert (row.answers, row.prompts) == (10, 10)
    assert row.counts == {"loop": 3, "count": 0, "call": 0, "calls": 0}
    assert row.stops == {"<|end_of_msg|>": 6, "length": 4}
    rate = row.estimates["loops"]
    wanted = np.array([1.0] * 3 + [0.0] * 7)
    assert rate.value == 0.3
    assert rate == Bootstrap(np.arange(10), np.zeros(10)).mean(wanted)
    assert interval_of(wanted) == pytest.approx((rate.low, rate.high), abs=0.06)
    assert row.estimates["first_loop"].value == 21
    assert row.estimates["ends_by_itself"].value == 0.6
    assert row.estimates["open_section"].value == 0.4
    assert row.estimates["calls_unoffered"].value == 0
    # Nothing of tools can be said where none is offered, and of no short answer either.
    assert not {"calls_tools", "tool_call_parses"} & {*row.estimates}
    assert "think_drift" in row.estimates


def interval_of(values: np.ndarray) -> tuple[float, float]:
    """The interval of a mean by drawing ten of ten, and what that is too narrow by."""
    draws = np.random.default_rng(5).choice(values, (4000, len(values))).mean(axis=1)
    wide = (
        values.mean()
        + (draws - values.mean()) * (len(values) / (len(values) - 1)) ** 0.5
    )
    low, high = np.quantile(wide, [0.025, 0.975])
    return float(low), float(high)


def test_tool_calls_of_known_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = [
        *[marked(CALLED.format("now"))] * 3,
        *[marked(CALLED.format("later"))] * 2,
        *[marked(SAID)] * 3,
    ]
    chats = script(tmp_path, answers, [TOOL])
    speak(monkeypatch, chats, answers)
    assert run(chats, tmp_path / "out", "--setting", "greedy") == 0
    row = Generation.load(tmp_path / "out").settings["greedy"].corpus["chats"]
    assert row.counts["call"] == row.counts["calls"] == 5
    assert row.estimates["calls_tools"].value == 5 / 8
    assert row.estimates["tool_call_parses"].value == 1
    assert row.estimates["tool_call_known"].value == 3 / 5
    assert row.estimates["tool_call_valid"].value == 3 / 5
    assert "calls_unoffered" not in row.estimates


def test_a_loop_that_ends_is_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun = marked("Well.<|close|>think<|sep|><|open|>response<|sep|>")
    loop = looping(4, 6, 0, 140).ids
    answers = [[*begun, *loop, *marked(END)], [*begun, *loop[:120], *marked(END)]]
    chats = script(tmp_path, answers)
    speak(monkeypatch, chats, answers)
    assert run(chats, tmp_path / "out", "--setting", "greedy") == 0
    row = Generation.load(tmp_path / "out").settings["greedy"].overall
    assert row.stops == {"<|end_of_msg|>": 2}
    assert row.estimates["loops"].value == 0.5
    assert row.estimates["first_loop"].value == len(begun)


def test_a_share_of_none_is_not_sure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = [marked(SAID)] * 10
    chats = script(tmp_path, answers)
    speak(monkeypatch, chats, answers)
    found = generation(
        NANO, chats, tmp_path / "out", settings=["greedy"], max_tokens=99
    )
    row = found.settings["greedy"].overall
    loops, ends = row.estimates["loops"], row.estimates["ends_by_itself"]
    assert (loops.value, loops.low, ends.value, ends.high) == (0, 0, 1, 1)
    assert loops.high is not None
    assert ends.low == 1 - loops.high
    # With such a share, none of ten prompts would show it in 1 of 40 runs.
    assert (1 - loops.high) ** 10 == pytest.approx(0.025)


def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    answers = [TEN[2][:60], marked(SAID), marked(CALLED.format("now"))]
    chats = script(tmp_path, answers)
    model = speak(monkeypatch, chats, answers)
    monkeypatch.setattr(module, "load", cache(module.load))
    whole = tmp_path / "whole"
    options = ("--answers", "2", "--max-tokens", "60")
    assert run(chats, whole, *options) == 0
    wanted = {name: (whole / name).read_bytes() for name in (ANSWERS, FILE_NAME)}
    assert len(wanted[ANSWERS].splitlines()) == 9
    for number, calls in enumerate((0, 1, 100, model.calls - 1)):
        out = tmp_path / str(number)
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(model, "stops_at", model.calls + calls)
            assert run(chats, out, *options) == 130
        told = capsys.readouterr().err
        assert (
            f"Go on with the same command: finished answers are kept in {out}" in told
        )
        assert not (out / FILE_NAME).exists()
        with (out / ANSWERS).open("ab") as file:
            file.write(b'{"corpus": "chats", "pro')  # what a kill may leave
        assert run(chats, out, *options) == 0
        assert {name: (out / name).read_bytes() for name in wanted} == wanted
        assert {path.name for path in out.iterdir()} == {*wanted, "asked.json"}
    # Finished, nothing is asked again.
    before = model.calls
    assert run(chats, whole, *options) == 0
    assert model.calls == before


def test_other_conditions_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    answers = [marked(SAID)] * 2
    chats = script(tmp_path, answers)
    speak(monkeypatch, chats, answers)
    out = tmp_path / "out"

    def ask(**options: Any) -> Generation:
        given: Any = {"answers": 1, "max_tokens": 60} | options
        return generation(NANO, chats, out, **given)

    first = ask()
    for options, named in (
        ({"answers": 2}, "answers was 1 and is 2 now"),
        ({"max_tokens": 61}, "max_tokens was 60 and is 61"),
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"settings": ["greedy"]}, "settings was"),
        ({"limit": 1}, "prompts was"),
    ):
        with pytest.raises(EvaluationError, match=rf"{named}.*--restart"):
            ask(**options)
    for name in ("version", "values_digest", "folder_fingerprint"):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_: "other")
            with pytest.raises(EvaluationError, match="and is other now"):
                ask()
    assert ask() == first
    assert ask(seed=1, restart=True).about["seed"] == 1


def test_foreign_folders_are_left_alone(tmp_path: Path):
    chats = script(tmp_path, [[]])
    with pytest.raises(EvaluationError, match=r"holds chats.jsonl, and no answers"):
        generation(NANO, chats, tmp_path)


def test_damaged_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    answers = [marked(SAID)] * 2
    chats = script(tmp_path, answers)
    speak(monkeypatch, chats, answers)
    out = tmp_path / "out"
    generation(NANO, chats, out, max_tokens=60)
    result = out / FILE_NAME
    whole = result.read_text()
    result.write_text(whole.replace('"value": 1.0', '"value": 0.5', 1))
    with pytest.raises(EvaluationError, match=r"changed after it was written"):
        Generation.load(out)
    result.unlink()
    lines = (out / ANSWERS).read_bytes().splitlines(keepends=True)
    (out / ANSWERS).write_bytes(b"".join(lines[::-1]))
    with pytest.raises(EvaluationError, match=r"line 1 answers something else"):
        generation(NANO, chats, out, max_tokens=60)
    (out / ANSWERS).write_bytes((out / ANSWERS).read_bytes().replace(b"{", b"[", 1))
    with pytest.raises(EvaluationError, match=r"line 1 is no answer"):
        generation(NANO, chats, out, max_tokens=60)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"answers": 0}, "answers is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"settings": ["hot"]}, r"settings are 'hot'; choose some of greedy, sampled"),
        ({"settings": []}, "settings are none"),
    ],
)
def test_what_is_asked_is_checked(tmp_path: Path, options: Any, wanted: str):
    with pytest.raises(EvaluationError, match=wanted):
        generation(NANO, tmp_path / "chats.jsonl", tmp_path / "out", **options)


def test_a_build_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, machine = open_folder(NANO), read_machine()
    refuse_too_large(folder, machine)
    small = replace(machine, memory=3_000_000, gpu_memory=None)
    with pytest.raises(EvaluationError, match=r"this machine has.*mlx\.launch"):
        refuse_too_large(folder, small)
    gpu = replace(machine, memory=9_000_000, gpu_memory=3_000_000)
    with pytest.raises(EvaluationError, match=r"its GPU may use"):
        refuse_too_large(folder, gpu)
    # Before anything is loaded, and nothing is left.
    monkeypatch.setattr(module, "read_machine", lambda: small)
    monkeypatch.setattr(module, "load", None)
    chats = script(tmp_path, [[]])
    with pytest.raises(EvaluationError, match="kimi-k3 evaluate"):
        generation(NANO, chats, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_without_jsonschema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    chats = script(tmp_path, [[]], [TOOL])
    with pytest.raises(MissingPackageError, match=r"kimi-k3-mlx\[evaluate\]"):
        generation(NANO, chats, tmp_path / "out")


def test_values_tell_builds_of_equal_shapes_apart():
    seeds = Path(NANO).parent.parent.parent / "benchmarks" / "nano"
    found = [values_digest(open_folder(seeds / f"seed{n}")) for n in (1, 2)]
    assert found[0] != found[1]
    assert found[0] == values_digest(open_folder(seeds / "seed1"))


def test_an_answer_depends_on_its_seed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "load", cache(module.load))
    lines = [conversation("What is 2 + 2?"), conversation("Is 39 or 74 larger?")]
    options: Any = {"max_tokens": 6, "answers": 2, "settings": ["sampled"]}

    def answers(out: str, order: list[Any], **more: Any) -> dict[Any, Any]:
        chats = write_chats(tmp_path / "chats.jsonl", order)
        generation(NANO, chats, tmp_path / out, **options | more)
        found = AnswerFile(tmp_path / out).answers
        return {(one.digest, one.number): (one.seed, one.ids) for one in found}

    both = answers("both", lines)
    alone = answers("alone", lines[1:])
    assert len(both) == 4
    assert len(alone) == 2
    assert alone.items() <= both.items()
    other = answers("other seed", lines[1:], seed=1)
    assert other.keys() == alone.keys()
    assert {ids for _, ids in other.values()} != {ids for _, ids in alone.values()}
    assert len({ids for _, ids in both.values()}) > 2


def test_seeds_differ_and_stay():
    seeds = {
        seed_of(seed, digest, setting, number)
        for seed in range(3)
        for digest in ("a", "b")
        for setting in ("greedy", "sampled")
        for number in range(3)
    }
    assert len(seeds) == 36
    assert max(seeds) < 2**53
    assert seed_of(0, "a", "sampled", 0) == 256249491555170


def test_help_teaches(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        main(["generation", "--help"])
    told = capsys.readouterr().out
    for word in ("chats.jsonl", "--limit 5", "answers.jsonl", "goes on where it was"):
        assert word in told
