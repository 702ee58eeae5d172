"""Looks at an installation: whose K3 class answers, on what machine, what to mend.

:func:`diagnose` returns a :class:`Report`; nothing is printed or changed. Whose class
answers is decided by the file it came from.
"""

import importlib
import inspect
import platform
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec

from .. import __version__, registration
from ..errors import RegistrationError
from .hardware import Machine, memory_for_gpu, read_machine

PACKAGES = ("mlx", "mlx-lm", "mlx-vlm", "transformers", "tiktoken", "numpy")

#: Host library -> the module that it asks for a Kimi K3 class.
HOSTS = {"mlx-lm": "mlx_lm.models.kimi_k3", "mlx-vlm": "mlx_vlm.models.kimi_k3"}

NOT_INSTALLED = "not installed"

GIB = 2**30


@dataclass(frozen=True)
class Finding:
    """Something to know or mend. ``stops`` says that K3 does not run because of it."""

    what: str
    remedy: str
    stops: bool = False


@dataclass(frozen=True)
class HostAnswer:
    """Whose class a host library gets for ``model_type: kimi_k3``, and why.

    ``ours`` is None if the host is not installed or its module does not import.
    """

    host: str
    ours: bool | None
    file: str | None
    reason: str


@dataclass(frozen=True)
class Report:
    """All that :func:`diagnose` saw; ``machine`` is None if mlx does not import.

    ``versions`` maps a package to its version, None if it is not installed.
    """

    versions: dict[str, str | None]
    hosts: tuple[HostAnswer, ...]
    machine: Machine | None
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether nothing that was found stops K3 from running."""
        return not any(finding.stops for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """The report as plain values, for JSON."""
        return {**asdict(self), "healthy": self.healthy}

    def text(self) -> str:
        """The report for a reader."""
        lines = [f"{name:14}{found or '-'}" for name, found in self.versions.items()]
        lines.append("")
        for answer in self.hosts:
            owner = {True: "our class", False: "its own class", None: "no class"}
            lines.append(f"{answer.host:14}{owner[answer.ours]}: {answer.reason}")
            if answer.file:
                lines.append(f"{'':14}{answer.file}")
        if machine := self.machine:
            lines += ["", f"{'system':14}{machine.system} {machine.system_version}"]
            lines.append(f"{'device':14}{machine.device}")
            lines.append(f"{'memory':14}{machine.memory / GIB:.1f} GiB")
            if machine.gpu_memory:
                lines.append(f"{'for the GPU':14}{machine.gpu_memory / GIB:.1f} GiB")
            if machine.wired_limit_mb is not None:
                limit = machine.wired_limit_mb or "0 (system default)"
                lines.append(f"{'wired limit':14}{limit}")
        for finding in self.findings:
            kind = "problem" if finding.stops else "note"
            lines += ["", f"{kind}: {finding.what}", f"  {finding.remedy}"]
        verdict = "K3 runs here." if self.healthy else "K3 does not run here."
        return "\n".join([*lines, "", verdict])


def diagnose() -> Report:
    """Look at this Python and this machine. Imports mlx, mlx-lm and mlx-vlm."""
    versions = {"kimi-k3-mlx": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in PACKAGES}
    findings = package_findings(versions)
    machine = None
    try:
        machine = read_machine()
    except ImportError as error:
        findings.append(
            Finding(
                f"mlx does not import: {error}",
                'Install it again; on Linux: pip install "kimi-k3-mlx[cpu]"',
                stops=True,
            )
        )
    hosts = tuple(ask_host(host) for host in HOSTS)
    for answer in hosts:
        findings += host_findings(answer)
    if machine is not None:
        findings += machine_findings(machine)
    return Report(versions, hosts, machine, tuple(findings))


def ask_host(host: str) -> HostAnswer:
    """Import the module that ``host`` asks for K3, and see where its class is from."""
    name = HOSTS[host]
    package = name.partition(".")[0]
    if find_spec(package) is None:
        return HostAnswer(host, None, None, NOT_INSTALLED)
    try:
        registration.check_host(package)
        file = inspect.getfile(importlib.import_module(name).Model)
    except RegistrationError as error:
        return HostAnswer(host, None, None, str(error))
    # A host may fail in any way of its own; the doctor tells which.
    except Exception as error:
        return HostAnswer(host, None, None, f"{type(error).__name__}: {error}")
    if registration.is_ours(file):
        return HostAnswer(host, True, file, f"import finder from {_installed_by()}")
    return HostAnswer(host, False, file, _why_not_ours(name))


def host_findings(answer: HostAnswer) -> list[Finding]:
    """What is wrong with whose class a host gets. mlx-vlm may be left out."""
    needed = answer.host == "mlx-lm"
    if answer.ours is None:
        if answer.reason == NOT_INSTALLED and not needed:
            return []
        what = f"{answer.host} has no kimi_k3: {answer.reason}"
        return [Finding(what, f"pip install -U {answer.host}", stops=needed)]
    if answer.ours or registration.our_file(HOSTS[answer.host]) is None:
        return []
    what = f"{answer.host} uses its own kimi_k3 class: {answer.reason}"
    return [Finding(what, _remedy_not_ours(), stops=True)]


def package_findings(versions: dict[str, str | None]) -> list[Finding]:
    """Packages that are missing, apart from mlx and the hosts, which are imported."""
    return [
        Finding(f"{name} is not installed", f"pip install {name}", stops=True)
        for name in ("tiktoken", "numpy")
        if versions[name] is None
    ]


def machine_findings(machine: Machine) -> list[Finding]:
    """What the machine lacks, and what its memory setting allows."""
    if machine.system != "macOS":
        if machine.gpu:
            return []
        return [
            Finding(
                "mlx computes on the CPU here",
                "Fine for tests and conversions; a Mac with Apple silicon runs the "
                "model fast.",
            )
        ]
    findings = []
    if machine.processor == "x86_64":
        findings.append(
            Finding(
                "this Python runs as an Intel program",
                "Install an arm64 Python; mlx needs it to reach the GPU.",
                stops=True,
            )
        )
    if int(machine.system_version.partition(".")[0]) < 15:
        findings.append(
            Finding(
                f"macOS {machine.system_version} cannot keep weights wired in memory",
                "Update to macOS 15 or newer; before that, large builds run slowly.",
            )
        )
    return findings + wired_limit_findings(machine)


def wired_limit_findings(machine: Machine) -> list[Finding]:
    """macOS lets the GPU use about 3/4 of the memory until it is told otherwise."""
    if machine.wired_limit_mb is None or machine.gpu_memory is None:
        return []
    roomy_mb = memory_for_gpu(machine.memory) // 2**20
    command = f"sudo sysctl iogpu.wired_limit_mb={roomy_mb}"
    if machine.wired_limit_mb > roomy_mb:
        left = machine.memory / GIB - machine.wired_limit_mb / 1024
        return [
            Finding(
                f"iogpu.wired_limit_mb={machine.wired_limit_mb} leaves macOS only "
                f"{left:.1f} GiB, so the machine may freeze",
                command,
            )
        ]
    if machine.gpu_memory >= roomy_mb * 2**20 * 0.98 or roomy_mb <= 0:
        return []
    return [
        Finding(
            f"the GPU may use {machine.gpu_memory / GIB:.0f} of "
            f"{machine.memory / GIB:.0f} GiB; larger builds run very slowly",
            f"For such a build: {command} (until the next restart)",
        )
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finder() -> registration.Finder | None:
    found = (f for f in sys.meta_path if isinstance(f, registration.Finder))
    return next(found, None)


def _installed_by() -> str:
    finder = _finder()
    return finder.installed_by if finder else "an earlier kimi_k3.register()"


def _why_not_ours(name: str) -> str:
    if registration.our_file(name) is None:
        return "kimi-k3-mlx has none for it yet"
    if registration.switched_off():
        return f"{registration.SWITCH}=off is set"
    if _finder() is None:
        return "no start-up file of kimi-k3-mlx ran in this Python"
    return "it was imported before the import finder was installed"


def _remedy_not_ours() -> str:
    if registration.switched_off():
        return f"unset {registration.SWITCH}"
    return (
        "pip install --force-reinstall --no-deps kimi-k3-mlx; where Python ignores "
        "start-up files, call kimi_k3.register() first or use `kimi-k3 run`"
    )
