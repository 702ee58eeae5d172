"""Looks a finished build through: is this folder whole, and are its numbers sane?

Everything that :func:`kimi_k3.folder_check.check_folder` sees, all faults and not the
first only; then the values, shard by shard in bounded memory; then the files beside the
shards. Whether the numbers are those of a source is not asked here.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checkpoint.folder import Folder, read_folder
from ..checkpoint.values import is_read, value_faults
from ..errors import KimiK3Error
from ..folder_check import check_tensors
from ..tokenizer.files import (
    CONTROL_IDS,
    VOCAB_FILE,
    check_tokenizer_folder,
    read_ranks,
    stated_end_ids,
)

GENERATION = "generation_config.json"

#: Told how many bytes have been read, and of how many.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``looked_at`` of nothing is a failure."""

    name: str
    looked_at: int
    unit: str


@dataclass(frozen=True)
class Finding:
    """Something to know; a fault unless it is but a ``note``."""

    what: str
    note: bool = False


@dataclass(frozen=True)
class VerifyReport:
    """All that :func:`verify_build` saw."""

    folder: str
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.note]

    @property
    def passed(self) -> bool:
        """Whether every check looked at something and none found a fault."""
        looked = all(check.looked_at > 0 for check in self.checks)
        return bool(self.checks) and looked and not self.faults

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return {**asdict(self), "passed": self.passed}

    def text(self) -> str:
        """The report for a reader, a line a check and a finding."""
        lines = [self.folder, ""]
        for check in self.checks:
            looked = (
                f"{check.looked_at:,} {check.unit}" if check.looked_at else "not done"
            )
            lines.append(f"  {check.name:14}{looked}")
        for finding in self.findings:
            lines += ["", f"{'note' if finding.note else 'fault'}: {finding.what}"]
        count = len(self.faults)
        if self.passed:
            verdict = "This build is whole."
        elif count:
            verdict = f"This build has {count} fault{'s' if count > 1 else ''}."
        else:
            verdict = "Not every check could be done."
        return "\n".join([*lines, "", f"{verdict} ({self.seconds:.1f} s)"])


def verify_build(path: str | Path, *, progress: Progress | None = None) -> VerifyReport:
    """Verify the checkpoint folder ``path``; what is wrong is in the report.

    ``progress`` is called as values are read, which takes the time on a large build.
    Raises nothing but what the machine itself raises: faults are findings.
    """
    started = time.monotonic()
    verification = _Verification(Path(path), progress)
    verification.run()
    return VerifyReport(
        str(path),
        tuple(verification.checks),
        tuple(verification.findings),
        time.monotonic() - started,
    )


class _Verification:
    """The checks in their order; each is done if those before allow it."""

    def __init__(self, path: Path, progress: Progress | None):
        self.path = path
        self.progress = progress
        self.checks: list[Check] = []
        self.findings: list[Finding] = []

    def run(self) -> None:
        folder = self._folder()
        if folder is None:
            return
        clean = not self.findings
        self.findings += [Finding(note, note=True) for note in folder.notes]
        self._tensors(folder, clean)
        self._values(folder, clean)
        self._side_files(folder)

    def _folder(self) -> Folder | None:
        try:
            folder, faults = read_folder(self.path)
        except KimiK3Error as error:
            self._add("files", 0, "shards")
            self.findings.append(Finding(str(error)))
            return None
        self.findings += [Finding(str(fault)) for fault in faults]
        if not faults and (total_size := folder.total_size_note):
            self.findings.append(Finding(total_size))
        self._add("files", len(folder.headers), "whole shards")
        self._add("index", len(folder.index.shard_of), "tensors listed")
        return folder

    def _tensors(self, folder: Folder, clean: bool) -> None:
        looked = 0
        if clean:
            try:
                notes = check_tensors(folder)
                self.findings += [Finding(note, note=True) for note in notes]
                looked = len(folder.tensors)
            except KimiK3Error as error:
                self.findings.append(Finding(str(error)))
        self._add(
            "tensors", looked, "names, shapes, types and widths as the config says"
        )

    def _values(self, folder: Folder, clean: bool) -> None:
        """NaN, infinity and zeros, where nothing is missing: a rerun reads it all."""
        sizes = {
            name: tensor.nbytes
            for name, tensor in folder.tensors.items()
            if is_read(name, tensor)
        }
        done, total, looked = 0, sum(sizes.values()), 0

        def tell(nbytes: int) -> None:
            nonlocal done, looked
            done, looked = done + nbytes, looked + 1
            if self.progress is not None:
                self.progress(done, total)

        heads = folder.args.text_config.linear_attn_config.num_heads
        for header in folder.headers.values() if clean else ():
            try:
                faults = value_faults(header, heads, tell)
            except KimiK3Error as error:
                self.findings.append(Finding(str(error)))
                continue
            self.findings += [Finding(str(fault)) for fault in faults]
        if clean and looked != len(sizes):
            self.findings.append(
                Finding(f"values of {looked} of {len(sizes)} tensors were read.")
            )
        self._add("values", looked, "float tensors and byte scales read")

    def _side_files(self, folder: Folder) -> None:
        looked = 0
        try:
            check_tokenizer_folder(self.path)
            looked += 2
            self.findings += _vocabulary_findings(folder)
        except KimiK3Error as error:
            self.findings.append(Finding(str(error)))
        if (self.path / GENERATION).is_file():
            looked += 1
        else:
            self.findings.append(
                Finding(
                    f"{GENERATION} is not there: nothing tells a host the release's "
                    "sampling (temperature 1.0, top-p 0.95).",
                    note=True,
                )
            )
        self._add("side files", looked, "files beside the shards")

    def _add(self, name: str, looked_at: int, unit: str) -> None:
        self.checks.append(Check(name, looked_at, unit))


def _vocabulary_findings(folder: Folder) -> list[Finding]:
    """Token ids must have rows in the embedding, end ids must be token ids."""
    rows = folder.args.text_config.vocab_size
    ids = len(read_ranks(folder.path / VOCAB_FILE)) + CONTROL_IDS
    findings = []
    if ids > rows:
        findings.append(
            Finding(
                f"{VOCAB_FILE} and its control ids make {ids} token ids, but config.json's "
                f"vocab_size is {rows}; they are of different models."
            )
        )
    if beyond := sorted(end for end in stated_end_ids(folder.path) if end >= ids):
        findings.append(
            Finding(
                f"eos_token_id is {beyond[0]}, which is none of the {ids} token ids; "
                "generation would never end there. Take config.json and "
                f"{GENERATION} from the checkpoint's own repository."
            )
        )
    return findings
