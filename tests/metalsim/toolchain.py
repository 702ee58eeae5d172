"""Compiles kernels with clang; programs are kept by the hash of all that is in them."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import mlx.core as mx

PACKAGE = Path(__file__).parent
COMPILERS = ("clang++-19", "clang++-20", "clang++-18", "clang++-17", "clang++")

#: Number that the executor knows each sanitizer by, and clang's flags for it.
SANITIZERS: dict[str | None, tuple[int, list[str]]] = {
    None: (0, []),
    "address": (
        1,
        [
            "-fsanitize=address,undefined",
            "-fno-sanitize=alignment",
            "-fno-sanitize-recover=undefined",
        ],
    ),
    "thread": (2, ["-fsanitize=thread"]),
    # -O0: the optimiser removes reads of uninitialised memory.
    "memory": (3, ["-fsanitize=memory", "-O0"]),
}
# MLX's own utils.h is used as it is.
INCLUDES = [f"-I{PACKAGE / 'include'}", f"-I{Path(mx.__file__).parent / 'include'}"]
KERNEL_FLAGS = ["-std=c++14", "-fno-exceptions", "-w", "-ferror-limit=5", *INCLUDES]
MACHINE_FLAGS = [
    "-O2",
    "-g1",
    "-march=x86-64-v3",
    "-ffp-contract=off",
    "-Xclang",
    "-ffloat16-excess-precision=none",
]

_chosen: list[Path] = []


class MetalSimError(RuntimeError):
    """A kernel that does not compile, or a fault while it ran."""


def keep_programs_in(folder: Path) -> None:
    """Where compiled programs stay; without this call they live as long as Python."""
    _chosen[:] = [folder]


@cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="metalsim-")


def _folder() -> Path:
    return _chosen[0] if _chosen else Path(_temporary_folder().name)


@cache
def compiler() -> str:
    """Path of a clang that can be used, or a MetalSimError."""
    for name in (os.environ.get("METALSIM_CXX"), *COMPILERS):
        if name and (found := shutil.which(name)):
            return found
    raise MetalSimError(
        "No clang++ 17 or newer was found, which simulated Metal kernels need: "
        "run scripts/install-clang, or name one in METALSIM_CXX."
    )


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        first = "\n".join(done.stderr.splitlines()[:30])
        raise MetalSimError(f"kernel does not compile:\n{first}")


@cache
def _shim_digest() -> bytes:
    """Hash of the C++ parts and the compiler's name."""
    paths = sorted(PACKAGE.rglob("*"))
    files = [p for p in paths if p.is_file() and p.suffix in (".cpp", ".h", "")]
    content = b"".join(p.read_bytes() for p in files) + compiler().encode()
    return hashlib.sha256(content).digest()


def _kept(suffix: str, text: str, build: Callable[[Path], None]) -> Path:
    """The file that ``build`` makes as ``out`` in a folder, built once."""
    digest = hashlib.sha256(_shim_digest() + text.encode()).hexdigest()[:24]
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (digest + suffix)
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as work:
            build(Path(work))
            (Path(work) / "out").replace(target)
    return target


def _check_address_spaces(text: str) -> None:
    """Type-check with real address spaces; nothing is generated."""

    def build(work: Path) -> None:
        file = work / "kernel.cpp"
        file.write_text(text)
        flags = [*KERNEL_FLAGS, "-DMETALSIM_STRICT", "-fsyntax-only"]
        _run([compiler(), *flags, str(file)])
        (work / "out").touch()

    _kept(".checked", text, build)


def compile_program(text: str, sanitizer: str | None, strict: bool) -> Path:
    """The program that runs the kernel ``text`` over a grid.

    With ``strict`` it is type-checked at the same time, and that check's errors come
    first.
    """
    if not strict:
        return _compile(text, sanitizer)
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(_check_address_spaces, text)
        try:
            return _compile(text, sanitizer)
        finally:
            checked.result()


def _compile(text: str, sanitizer: str | None) -> Path:
    number, flags = SANITIZERS[sanitizer]
    common = [compiler(), *MACHINE_FLAGS]

    def build_executor(work: Path) -> None:
        flags = ["-std=c++17", "-fno-builtin", f"-DMETALSIM_SANITIZER={number}"]
        source, out = str(PACKAGE / "executor.cpp"), str(work / "out")
        _run([*common, *flags, *INCLUDES, "-c", source, "-o", out])

    def build(work: Path) -> None:
        executor = _kept(".o", f"executor {number}", build_executor)
        source, kernel = work / "kernel.cpp", str(work / "kernel.o")
        source.write_text(text)
        _run([*common, *KERNEL_FLAGS, *flags, "-c", str(source), "-o", kernel])
        _run([*common, *flags, kernel, str(executor), "-o", str(work / "out")])

    return _kept(".run", f"{sanitizer}\n{text}", build)
