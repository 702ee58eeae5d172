"""What a verification looked at and found, as values, as JSON and in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median


@dataclass(frozen=True)
class Check:
    """One thing that was looked at, and how much of it.

    ``looked_at`` of nothing is a failure, and so is less than ``wanted`` where it is
    known how much there is to look at.
    """

    name: str
    looked_at: int
    unit: str
    wanted: int | None = None

    @property
    def done(self) -> bool:
        return self.looked_at > 0 and self.wanted in (None, self.looked_at)

    def text(self) -> str:
        if not self.looked_at:
            return "not done"
        of_all = "" if self.done else f" of {self.wanted:,}"
        return f"{self.looked_at:,}{of_all} {self.unit}"


@dataclass(frozen=True)
class Finding:
    """Something to know; a fault unless it is but a ``note``."""

    what: str
    note: bool = False


@dataclass(frozen=True)
class LowExpert:
    """An expert of the low bank against the source expert that it was made of.

    ``error`` is Σ(difference²) / Σ(source²) over its three matrices.
    """

    layer: int
    expert: int
    source: int
    error: float


@dataclass(frozen=True)
class ClassError:
    """The largest such error among the quantised matrices of one class."""

    name: str
    bits: int
    matrices: int
    largest: float
    module: str


@dataclass(frozen=True)
class Comparison:
    """What was measured against a source.

    Attributes:
        source: its folder.
        experts: "all", or how many experts of each bank were drawn in each layer.
        seed: that they were drawn with.
        compared: layer → numbers in the build of the experts that were compared.
        low_bank: every expert of a low bank among them.
        classes: every class of matrices that is quantised.
    """

    source: str
    experts: int | str
    seed: int
    compared: Mapping[int, Sequence[int]] = field(default_factory=dict)
    low_bank: tuple[LowExpert, ...] = ()
    classes: tuple[ClassError, ...] = ()

    @property
    def verdict(self) -> str:
        """What a comparison without a fault proves of a build."""
        says = "what its record says it is"
        if self.experts == "all":
            return says
        some = "expert" if self.experts == 1 else "experts"
        return f"{says} as far as it was looked at ({self.experts} {some} a bank)"

    def text(self) -> list[str]:
        """Lines for a reader."""
        count = sum(len(experts) for experts in self.compared.values())
        lines = ["", f"compared with {self.source}"]
        if self.experts == "all":
            lines.append(f"  experts: all {count:,}")
        else:
            lines.append(
                f"  experts: {count:,}, up to {self.experts} of each bank in a layer, "
                f"drawn with seed {self.seed}; the others were not looked at"
            )
        if self.low_bank:
            lines.append("  low bank, relative squared error: least, median, largest")
        for layer in sorted({expert.layer for expert in self.low_bank}):
            errors = [e.error for e in self.low_bank if e.layer == layer]
            lines.append(
                f"    layer {layer:<3} {min(errors):.4f}  {median(errors):.4f}  "
                f"{max(errors):.4f}"
            )
        if self.classes:
            lines.append("  quantised matrices, relative squared error: largest")
        lines += [
            f"    {found.name:32} {found.bits} bits  {found.largest:.2e}"
            for found in self.classes
        ]
        return lines


@dataclass(frozen=True)
class VerifyReport:
    """All that :func:`~kimi_k3.build.verify.verify` saw."""

    folder: str
    checks: tuple[Check, ...]
    findings: tuple[Finding, ...]
    seconds: float
    comparison: Comparison | None = None

    @property
    def faults(self) -> list[Finding]:
        return [finding for finding in self.findings if not finding.note]

    @property
    def passed(self) -> bool:
        """Whether every check looked at all it should and none found a fault."""
        done = all(check.done for check in self.checks)
        return bool(self.checks) and done and not self.faults

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return {**asdict(self), "passed": self.passed}

    def text(self) -> str:
        """The report for a reader, a line a check and a finding."""
        lines = [self.folder, ""]
        lines += [f"  {check.name:14}{check.text()}" for check in self.checks]
        if self.comparison is not None:
            lines += self.comparison.text()
        for finding in self.findings:
            lines += ["", f"{'note' if finding.note else 'fault'}: {finding.what}"]
        count = len(self.faults)
        if self.passed:
            verdict = "This build is whole."
            if self.comparison is not None:
                verdict = f"This build is whole, and {self.comparison.verdict}."
        elif count:
            verdict = f"This build has {count} fault{'s' if count > 1 else ''}."
        else:
            verdict = "Not every check could be done."
        return "\n".join([*lines, "", f"{verdict} ({self.seconds:.1f} s)"])
