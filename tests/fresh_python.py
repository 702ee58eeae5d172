"""New Python processes for tests, and a witness that tells whose K3 class they used.

The witness is a ``sitecustomize.py`` on PYTHONPATH: every process that inherits the
environment, whatever started it, notes at its end the file of the class that mlx-lm
would take for ``kimi_k3``, if it asked for one.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_WITNESS = """
import atexit, os, sys

def testify():
    model = getattr(sys.modules.get("mlx_lm.models.kimi_k3"), "Model", None)
    if model is not None:
        import inspect
        with open(os.environ["K3_WITNESS"], "a") as statements:
            statements.write(inspect.getfile(model) + "\\n")

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "mlx_lm.models.kimi_k3":
            raise ModuleNotFoundError("hidden for a test", name=name)

atexit.register(testify)
if "K3_HIDE" in os.environ:
    sys.meta_path.insert(1, Hide())
"""


def run_python(
    arguments: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    python: str | Path = sys.executable,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run ``python *arguments``, as :func:`run_command` does."""
    return run_command([python, *arguments], environment, timeout=timeout)


def run_command(
    command: Sequence[str | Path],
    environment: Mapping[str, str] | None = None,
    *,
    timeout: float = 120,
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` with stdin closed; its output is captured as text.

    ``environment`` is added to that of the tests, less their KIMI_K3_MLX.
    """
    return subprocess.run(
        [str(part) for part in command],
        env=environment_with(environment or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def environment_with(changes: Mapping[str, str]) -> dict[str, str]:
    """The environment of the tests less their KIMI_K3_MLX, with ``changes``."""
    inherited = {k: v for k, v in os.environ.items() if k != "KIMI_K3_MLX"}
    return inherited | dict(changes)


def witness(folder: Path, *, hide_host: bool = False) -> dict[str, str]:
    """Environment that makes processes testify into ``folder``.

    ``hide_host`` makes mlx-lm's own ``kimi_k3`` unfindable in them.
    """
    (folder / "sitecustomize.py").write_text(_WITNESS)
    hidden = {"K3_HIDE": "1"} if hide_host else {}
    return {
        "K3_WITNESS": str(folder / "statements.txt"),
        "PYTHONPATH": str(folder),
        **hidden,
    }


def class_files(folder: Path) -> list[str]:
    """Files of the classes that the processes used, one entry a process."""
    statements = folder / "statements.txt"
    return statements.read_text().splitlines() if statements.exists() else []


def installed_command(name: str) -> Path:
    """The console script ``name`` of the environment that runs the tests."""
    return Path(sys.executable).parent / name
