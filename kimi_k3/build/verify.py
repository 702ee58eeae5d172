"""Looks a finished build through: is it whole, sane, and what its record says it is?

Of a folder of any format: everything that :func:`kimi_k3.folder_check.check_folder`
sees, all faults and not the first only; then the values, shard by shard in bounded
memory; then the files beside the shards. Of a build with the record of its conversion:
config, tensors and shards as its plan makes them. With the source: every number.
"""

import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint.folder import Folder, read_folder
from ..checkpoint.values import is_read, value_faults
from ..conversion.conversion_journal import PARTIAL
from ..conversion.side_files import GENERATION
from ..errors import KimiK3Error
from ..folder_check import check_tensors
from ..tokenizer.files import (
    CONTROL_IDS,
    VOCAB_FILE,
    check_tokenizer_folder,
    read_ranks,
    stated_end_ids,
)
from .verify_hashes import check_hashes
from .verify_record import RecordedBuild, check_record
from .verify_report import Check, Comparison, Finding, VerifyReport
from .verify_side_files import check_sampling
from .verify_source import SourceComparison, open_source

#: Told what is read ("values", "shards", "hashes" of the source, "source"), how many bytes
#: have been, and of how many.
Progress = Callable[[str, int, int], None]

ALL = "all"

#: How names of files end that are being written.
UNFINISHED = ".unfinished"


def verify(
    path: str | Path,
    source: str | Path | None = None,
    *,
    experts: int | str = ALL,
    seed: int = 0,
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify the checkpoint folder ``path``; what is wrong is in the report.

    Args:
        source: the folder that the build was converted from. Then every number of the
            build is compared with it, which reads both.
        experts: "all", or how many experts of each bank are compared in each layer.
        seed: for drawing them.
        progress: is called as values are read, which takes the time on a large build.

    Raises KimiK3Error for ``experts`` that are no number or that nothing is compared
    for, and for a ``seed`` that is none; faults are findings.
    """
    if experts != ALL and (type(experts) is not int or experts < 1):
        raise KimiK3Error(
            f"experts is {experts!r}; wanted {ALL!r}, or how many of each bank of a layer "
            "to compare, 1 or more."
        )
    if type(seed) is not int or seed < 0:
        raise KimiK3Error(f"seed is {seed!r}; wanted a whole number, 0 or more.")
    if source is None and experts != ALL:
        raise KimiK3Error(
            f"{experts} experts of each bank were asked for, but no source to compare "
            "them with. Name the source, or leave the number out."
        )
    started = time.monotonic()
    verification = _Verification(
        Path(path),
        None if source is None else Path(source),
        progress or (lambda what, done, total: None),
    )
    verification.run(experts, seed)
    return VerifyReport(
        str(path),
        tuple(verification.checks),
        tuple(verification.findings),
        time.monotonic() - started,
        verification.comparison,
    )


class _Verification:
    """The checks in their order; each is done if those before allow it."""

    def __init__(self, path: Path, source: Path | None, progress: Progress):
        self.path = path
        self.source = source
        self.progress = progress
        self.checks: list[Check] = []
        self.findings: list[Finding] = []
        self.comparison: Comparison | None = None

    def run(self, experts: int | str, seed: int) -> None:
        folder = self._folder()
        if folder is None:
            return
        clean = not self.findings
        self.findings += [Finding(note, note=True) for note in folder.notes]
        self._tensors(folder, clean)
        self._values(folder, clean)
        self._side_files(folder)
        build = self._record(folder)
        if build is not None and self.source is not None:
            self._compare(build, self.source, experts, seed)

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
            self.progress("values", done, total)

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
        self.findings += [
            Finding(
                f"{path.name} is left over from an interrupted conversion; delete it.",
                note=True,
            )
            for path in sorted(self.path.iterdir())
            if path.name == PARTIAL or path.name.endswith(UNFINISHED)
        ]
        self._add("side files", looked, "files beside the shards")

    def _record(self, folder: Folder) -> RecordedBuild | None:
        """The build by its record, if it has one that makes sense."""
        try:
            build = RecordedBuild.of(folder)
        except KimiK3Error as error:
            self.findings.append(Finding(str(error)))
            self._add("record", 0, "records")
            return None
        if build is not None:
            self._note(*check_record(build), *check_sampling(self.path))
            self._note(*check_hashes(build, self._teller("shards")))
        elif self.source is not None:
            self._add("source", 0, "shards")
            self.findings.append(
                Finding(
                    "config.json has no record of a conversion, so nothing says which "
                    f"experts of {self.source} were kept: the build cannot be compared "
                    "with it. Verify it without a source, or convert with `kimi-k3 "
                    "convert`, which leaves a record."
                )
            )
        return build

    def _compare(
        self, build: RecordedBuild, source: Path, experts: int | str, seed: int
    ) -> None:
        stream, seen = open_source(build, source, self._teller("hashes"))
        self._note(*seen)
        if stream is not None:
            compared = SourceComparison(
                build, stream, experts, seed, self._teller("source")
            )
            self._note(*compared.run())
            self.comparison = compared.result

    def _teller(self, what: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(what, done, total)

    def _note(self, *seen: Check | Finding) -> None:
        self.checks += [found for found in seen if isinstance(found, Check)]
        self.findings += [found for found in seen if isinstance(found, Finding)]

    def _add(self, name: str, looked_at: int, unit: str) -> None:
        self.checks.append(Check(name, looked_at, unit))


def _vocabulary_findings(folder: Folder) -> list[Finding]:
    """Token ids must have rows in the embedding, end ids must be token ids."""
    rows = folder.args.text_config.vocab_size
    plain = len(read_ranks(folder.path / VOCAB_FILE))
    ids = plain + CONTROL_IDS
    findings = []
    if ids > rows:
        findings.append(
            Finding(
                f"{VOCAB_FILE} and its control ids make {ids} token ids, but config.json's "
                f"vocab_size is {rows}; they are of different models."
            )
        )
    ends = sorted(stated_end_ids(folder.path))
    if ends and ends[0] < plain:
        findings.append(
            Finding(
                f"eos_token_id is {ends[0]}, a token of plain text: generation would end "
                "wherever it is written. Take config.json and "
                f"{GENERATION} from the checkpoint's own repository."
            )
        )
    if beyond := [end for end in ends if end >= ids]:
        findings.append(
            Finding(
                f"eos_token_id is {beyond[0]}, which is none of the {ids} token ids; "
                "generation would never end there. Take config.json and "
                f"{GENERATION} from the checkpoint's own repository."
            )
        )
    return findings
