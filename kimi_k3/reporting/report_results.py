"""The results that a report is made of: files that were given, and whose they are."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..conversion.durable_files import write_durably
from ..errors import EvaluationError
from ..evaluation.comparison import SHARED
from ..evaluation.evaluation import FILE_NAME as PREDICTIONS
from ..evaluation.evaluation import Evaluation
from ..evaluation.summary import FILE_NAME as SUMMARY
from ..evaluation.summary import Summary
from .report_facts import BuildFacts

#: Hexadecimal digits of a digest that tell files apart in a caption.
SHORT = 12

#: A loaded model holds a little more or less than the headers say: padding, fused parts.
_TOKEN_TOLERANCE = 0.01


@dataclass(frozen=True)
class Source:
    """A file that numbers come from: its folder's name and its own, and its SHA-256."""

    name: str
    sha256: str

    @classmethod
    def of(cls, path: Path) -> Self:
        """Read the file ``path``; raises EvaluationError if that cannot be."""
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise EvaluationError(
                f"{path} cannot be read: {error.strerror}. Name a result file, or the "
                "folder that holds it."
            ) from error
        whole = path.resolve()
        return cls(f"{whole.parent.name}/{whole.name}", digest)

    def __str__(self) -> str:
        return f"{self.name} (SHA-256 {self.sha256[:SHORT]}…)"


@dataclass(frozen=True)
class Judged:
    """An evaluation: its summary and, where it lies beside it, every prediction."""

    summary: Summary
    source: Source
    folder: Path
    evaluation: Evaluation | None
    predictions: Source | None

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """From the folder that ``kimi-k3 evaluate`` filled, or its evaluation.json.

        Raises EvaluationError for anything else, and for predictions that are not those
        of the summary.
        """
        path = Path(path)
        file = path / SUMMARY if path.is_dir() else path
        summary = Summary.load(file)
        beside = file.parent / PREDICTIONS
        evaluation = predictions = None
        if beside.is_file():
            evaluation, predictions = Evaluation.load(beside), Source.of(beside)
            if evaluation.digest != summary.predictions:
                raise EvaluationError(
                    f"{file} is not the summary of {beside.name} beside it. Make both "
                    "again with `kimi-k3 evaluate`."
                )
        return cls(summary, Source.of(file), file.parent, evaluation, predictions)

    @property
    def build(self) -> str:
        """Name of the build's folder; never the whole path, which is nobody's matter."""
        return folder_name(self.summary.about, "build")

    @property
    def teacher(self) -> str:
        return folder_name(self.summary.about, "teacher")

    @property
    def checkpoint(self) -> str:
        """Fingerprint of the build."""
        return str(self.summary.about.get("build", {}).get("checkpoint", ""))

    def judged_like(self, other: "Judged") -> bool:
        """Whether teacher and samples are the same."""
        mine, theirs = self.summary.about, other.summary.about
        return all(
            mine.get("teacher", {}).get(key) == theirs.get("teacher", {}).get(key)
            for key in SHARED
        )


def folder_name(about: Any, side: str) -> str:
    """The last part of the path of ``side``, "build" or "teacher", in an ``about``."""
    found = about.get(side, {})
    path = found.get("path", "") if isinstance(found, dict) else found
    return Path(str(path)).name or f"unnamed {side}"


def load_judged(
    paths: Sequence[str | Path], facts: BuildFacts
) -> tuple[list[Judged], list[Judged]]:
    """Evaluations of the build, and of other builds by the same teacher and samples.

    Raises EvaluationError for an evaluation that has nothing to do with the build.
    """
    found = [Judged.load(path) for path in paths]
    mine = [one for one in found if one.checkpoint == facts.fingerprint]
    others = [one for one in found if one.checkpoint != facts.fingerprint]
    for other in others:
        if not any(other.judged_like(one) for one in mine):
            raise EvaluationError(
                f"{other.source.name} is an evaluation of {other.build} "
                f"({other.checkpoint or 'unknown'}), not of {facts.name} "
                f"({facts.fingerprint}), and no evaluation of {facts.name} by the same "
                "teacher and samples was given to compare it with. Evaluate this build, "
                "or leave the other one out."
            )
    return mine, others


def write_text(file: Path, text: str) -> Path:
    """Write ``file``, whole or not at all; raises EvaluationError if that cannot be."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_durably(file, text.encode())
    except OSError as error:
        raise EvaluationError(
            f"{file} cannot be written: {error.strerror}. Name another place with --out."
        ) from error
    return file


@dataclass(frozen=True)
class Benchmark:
    """What ``kimi-k3 bench`` printed, and the file."""

    content: dict[str, Any]
    source: Source

    @classmethod
    def load(cls, path: str | Path, facts: BuildFacts) -> Self:
        """The JSON document of ``path``, or of the last line of what was printed.

        Raises EvaluationError if it is no benchmark, or not of this build: as far as the
        bytes tell that a token reads.
        """
        path = Path(path)
        source = Source.of(path)
        remedy = f"Make it with `kimi-k3 bench {facts.name} > {path.name}`."
        try:
            text = path.read_text("utf-8").strip()
            try:
                content = json.loads(text)
            except ValueError:
                content = json.loads(text.splitlines()[-1])
            read = content["bytes_per_token"]
            for key in ("prefill", "decode", "peak_memory", "share_of_bandwidth"):
                float(content[key])
            content = {**content, "device": str(content["device"])}
        except (ValueError, IndexError, KeyError, TypeError) as error:
            raise EvaluationError(
                f"{path} is no benchmark: {error}. {remedy}"
            ) from error
        if abs(read / facts.token_bytes - 1) > _TOKEN_TOLERANCE:
            raise EvaluationError(
                f"{path} is of a build that reads {read:,} bytes a token; {facts.name} "
                f"reads {facts.token_bytes:,}. {remedy}"
            )
        return cls(content, source)
