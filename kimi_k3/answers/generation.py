"""Lets a build answer prompts, and counts what can be counted of its answers.

OUT/answers.jsonl      the answers, a line each
OUT/asked.json         what they depend on, written first
OUT/generation.json    what was counted, written last
OUT/partial/           the lock while it runs

Killed at any point it goes on with the answer it was at, to the same bytes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..build.folder_lock import locked_folder
from ..build.layer_stream import folder_fingerprint
from ..build.saliency import TOOL
from ..build.sample_rows import tokenizer_fingerprint
from ..build.samples import load_tokenizer
from ..checkpoint.folder import Folder
from ..checkpoint.values_digest import values_digest
from ..errors import EvaluationError
from ..evaluation.checks import refuse_inside
from ..evaluation.final_states import RESTART
from ..evaluation.sealed_json import read_json, write_json
from ..folder_check import open_folder
from ..loading import load
from ..machine.hardware import Machine, read_machine
from .answers import FILE_NAME as ANSWERS
from .answers import Answer, AnswerFile
from .generation_measures import Measurer
from .generation_prompts import PROMPT_TOKENS, PROMPTS, Prompts, read_prompts
from .generation_report import FILE_NAME, Generation, Judged
from .generation_run import SETTINGS, Job, answer, jobs

ASKED, PARTIAL = "asked.json", "partial"

KIND, VERSION = "what was asked of a build", 1

#: Answers a prompt when tokens are drawn, and tokens of each, unless told otherwise.
ANSWERS_A_PROMPT, MAX_TOKENS = 4, 1024


@dataclass(frozen=True)
class Asked:
    """What the bytes of the answers depend on.

    Attributes:
        checkpoint: fingerprint of the folder: names, shapes and types.
        values: hash of some stored values of it.
        tokenizer: fingerprint of its tokenizer.
        prompts: fingerprint of what is asked.
        answers: how many of a prompt. max_tokens: of each, at most.
        seed: of the run. settings: name → how tokens are drawn.
        tool, mlx, mlx_lm, device: what computes, and its versions.
    """

    checkpoint: str
    values: str
    tokenizer: str
    prompts: str
    answers: int
    max_tokens: int
    seed: int
    settings: Mapping[str, Mapping[str, float]]
    tool: str
    mlx: str
    mlx_lm: str
    device: str

    def refuse_other(self, content: Mapping[str, Any], out: Path) -> None:
        """Raise EvaluationError, naming what differs, if ``content`` is not this."""
        mine, theirs = asdict(self), dict(content["asked"])
        differences = [
            f"{name} was {theirs.get(name)} and is {mine[name]} now"
            for name in mine
            if theirs.get(name) != mine[name]
        ]
        if differences:
            raise EvaluationError(
                f"{out} holds other answers: {'; '.join(differences)}. Name another "
                f"folder, or {RESTART}"
            )


@dataclass(frozen=True)
class Progress:
    """How far it is: answers done of all, tokens of these, seconds gone and left.

    ``seconds_left`` is None before the first answer of this run.
    """

    done: int
    total: int
    tokens: int
    seconds: float
    seconds_left: float | None


Watch = Callable[[Progress], None]


def generation(
    build: str | Path,
    prompts: str | Path,
    out: str | Path,
    *,
    answers: int = ANSWERS_A_PROMPT,
    max_tokens: int = MAX_TOKENS,
    seed: int = 0,
    settings: Sequence[str] = tuple(SETTINGS),
    part: str = "held_out",
    limit: int = PROMPTS,
    prompt_tokens: int = PROMPT_TOKENS,
    restart: bool = False,
    progress: Watch | None = None,
    tell: Callable[[str], None] | None = None,
) -> Generation:
    """Let ``build`` answer ``prompts`` and count loops, stops, tool calls and drift.

    Called again with the same arguments it goes on where it was stopped, to the same
    bytes; finished, it gives the result.

    Args:
        build: a checkpoint folder of any format that fits into memory.
        prompts: a mix (TOML), a shipped mix's name, or a JSONL file of chats.
        out: a folder, new or of the same answers.
        answers: of each prompt, where tokens are drawn; greedy there is one.
        max_tokens: of an answer.
        settings: some of "greedy" and "sampled" (temperature 1.0, top-p 0.95).
        part: which part of a mix: "held_out", "calibration" or "all".
        limit: prompts a corpus. prompt_tokens: tokens of a text that are its prompt.
        restart: discard what ``out`` holds of an earlier run.
        progress: is told after each answer how far it is. tell: gets remarks.

    Raises the KimiK3Error that says what is wrong, before the build is loaded.
    """
    out, folder = Path(out), open_folder(build)
    refuse_inside(out, build=build)
    _check(answers, max_tokens, settings)
    machine = read_machine()
    tokenizer = load_tokenizer(folder.path)
    asking = read_prompts(
        prompts, tokenizer, part=part, limit=limit, prompt_tokens=prompt_tokens
    )
    for note in asking.notes if tell else ():
        tell(note)  # pyright: ignore[reportOptionalCall]
    chosen = [SETTINGS[name] for name in SETTINGS if name in settings]
    asked = Asked(
        checkpoint=folder_fingerprint(folder),
        values=values_digest(folder),
        tokenizer=tokenizer_fingerprint(tokenizer),
        prompts=asking.fingerprint,
        answers=answers,
        max_tokens=max_tokens,
        seed=seed,
        settings={setting.name: setting.to_dict() for setting in chosen},
        tool=TOOL,
        mlx=version("mlx"),
        mlx_lm=version("mlx-lm"),
        device=machine.device,
    )
    todo = jobs(asking.prompts, chosen, answers, seed)
    with locked_folder(out, PARTIAL, "answered", EvaluationError):
        if restart:
            discard(out)
        if _is_begun(out, asked) and (out / FILE_NAME).is_file():
            return Generation.load(out)
        refuse_too_large(folder, machine)
        write_json(out / ASKED, KIND, VERSION, {"asked": asdict(asked)})
        file = AnswerFile(out)
        file.refuse_others([job.key for job in todo])
        model, wrapper = load(folder.path)
        _answer_all(model, wrapper, todo, file, max_tokens, progress)
        result = count(file.answers, asking, wrapper, _about(asked, folder))
        result.save(out)
    return result


def count(
    answers: Sequence[Answer], prompts: Prompts, tokenizer: Any, about: dict[str, Any]
) -> Generation:
    """Measure ``answers`` to ``prompts``; ``tokenizer`` is mlx-lm's wrapper."""
    measurer = Measurer(tokenizer)
    by_place = {(p.corpus, p.number): p for p in prompts.prompts}
    judged = [
        Judged(
            corpus=one.corpus,
            prompt=one.prompt,
            setting=one.setting,
            tokens=len(one.ids),
            measured=measurer.measure(one, by_place[one.corpus, one.prompt]),
        )
        for one in answers
    ]
    return Generation.of(judged, about)


def discard(out: Path) -> None:
    """Delete what was written to ``out``, but the lock; what tells of it last."""
    for name in (FILE_NAME, ANSWERS, ASKED):
        (out / name).unlink(missing_ok=True)


def refuse_too_large(folder: Folder, machine: Machine) -> None:
    """Raise EvaluationError if the weights do not fit into this machine's memory."""
    room = machine.gpu_memory or machine.memory
    if folder.data_bytes <= room:
        return
    who = "its GPU may use" if machine.gpu_memory else "this machine has"
    raise EvaluationError(
        f"{folder.path} has {folder.data_bytes / 1e9:.1f} GB of weights, and {who} "
        f"{room / 1e9:.1f} GB. To answer, all of a build must be in memory at once, of "
        "one machine: several of them (mlx.launch) are not served here yet. `kimi-k3 "
        "doctor` says whether the GPU can be given more; `kimi-k3 evaluate` judges "
        "builds of any size, layer by layer."
    )


def _answer_all(
    model: Any,
    tokenizer: Any,
    todo: Sequence[Job],
    file: AnswerFile,
    max_tokens: int,
    progress: Watch | None,
) -> None:
    begun, before = time.monotonic(), len(file.answers)
    for job in todo[before:]:
        file.append(answer(model, tokenizer, job, max_tokens))
        if progress is None:
            continue
        done, seconds = len(file.answers), time.monotonic() - begun
        left = seconds / (done - before) * (len(todo) - done)
        tokens = sum(len(one.ids) for one in file.answers[before:])
        progress(Progress(done, len(todo), tokens, seconds, left))


def _check(answers: int, max_tokens: int, settings: Sequence[str]) -> None:
    for name, value in (("answers", answers), ("max_tokens", max_tokens)):
        if value < 1:
            raise EvaluationError(f"{name} is {value}; it is at least 1.")
    unknown = [name for name in settings if name not in SETTINGS]
    if unknown or not settings:
        raise EvaluationError(
            f"settings are {', '.join(map(repr, settings)) or 'none'}; choose some of "
            f"{', '.join(SETTINGS)}."
        )


def _is_begun(out: Path, asked: Asked) -> bool:
    """Whether ``out`` was begun, as ``asked``; EvaluationError if otherwise."""
    path = out / ASKED
    if path.is_file():
        asked.refuse_other(read_json(path, KIND, VERSION, RESTART), out)
        return True
    foreign = sorted(found.name for found in out.iterdir() if found.name != PARTIAL)
    if foreign:
        raise EvaluationError(
            f"{out} holds {foreign[0]}, and no answers that were begun. Name an empty "
            "folder, or one that is not there yet."
        )
    return False


def _about(asked: Asked, folder: Folder) -> dict[str, Any]:
    content = asdict(asked)
    build = {name: content.pop(name) for name in ("checkpoint", "values", "tokenizer")}
    return {"build": {**build, "path": str(folder.path)}, **content}
