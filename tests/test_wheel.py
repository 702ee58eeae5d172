"""What pip installs: wheel, sdist and editable install, alone in a new environment.

The new environment sees the packages of the one that runs the tests through a path
file. Python runs no start-up files of such a folder, so whatever finder is found there
comes from what the test installed.
"""

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import mlx_lm
import numpy
import pytest
from fresh_python import run_command, run_python

ROOT = Path(__file__).parent.parent
STARTUP_FILES = {"kimi_k3_mlx.pth", "kimi_k3_mlx.start"}

pytestmark = pytest.mark.slow

#: Prints who answers for kimi_k3, from a folder where no kimi_k3 lies.
WHO = """
import inspect, sys
first = sys.meta_path[0]
print(getattr(first, "installed_by", "nobody"))
import mlx_lm.utils
model, _ = mlx_lm.utils._get_classes({"model_type": "kimi_k3"})
print(inspect.getfile(model))
"""


def succeed(command: list[str | Path]) -> str:
    done = run_command(command, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    succeed(build)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


class Environment:
    """A new virtual environment in ``folder``, without pip."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder / "env", with_pip=False)
        self.folder = folder
        self.python = folder / "env" / "bin" / "python"
        (self.packages,) = (folder / "env").glob("lib/python*/site-packages")
        # mlx-lm and the rest may lie in more folders than one.
        parents = {str(Path(m.__file__ or "").parents[1]) for m in (mlx_lm, numpy)}
        (self.packages / "parents.pth").write_text("\n".join(sorted(parents)))
        self.before = self.files()

    def files(self) -> set[str]:
        """Everything under site-packages, less what Python compiles."""
        found = (path.relative_to(self.packages) for path in self.packages.rglob("*"))
        return {str(path) for path in found if "__pycache__" not in path.parts}

    def pip(self, *arguments: str | Path) -> None:
        pip = [sys.executable, "-m", "pip", "--python", self.python]
        succeed([*pip, "--disable-pip-version-check", *arguments])

    def install(self, *what: str | Path) -> None:
        """Install from local files, also if the parents have the package."""
        self.pip("install", "--ignore-installed", "--no-deps", "--no-index", *what)

    def who(self, **environment: str) -> tuple[str, Path]:
        """Who put the finder in place, and the file of the class that answers."""
        (self.folder / "who.py").write_text(WHO)
        done = run_python(
            [self.folder / "who.py"], environment, python=self.python, timeout=300
        )
        assert done.returncode == 0, done.stderr
        by, file = done.stdout.splitlines()
        return by, Path(file)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path)


HOSTS_OWN = Path(mlx_lm.__file__ or "").parent / "models" / "kimi_k3.py"


def test_wheel_alone(built: dict[str, Path], environment: Environment):
    assert environment.who() == ("nobody", HOSTS_OWN)

    environment.install(built["wheel"])
    installed = environment.files() - environment.before
    assert installed >= STARTUP_FILES
    ours = environment.packages / "kimi_k3" / "models" / "kimi_k3.py"
    assert environment.who() == ("start-up file", ours)
    assert environment.who(KIMI_K3_MLX="off") == ("nobody", HOSTS_OWN)
    command = environment.python.parent / "kimi-k3"
    assert succeed([command, "--version"]).startswith("kimi-k3 ")

    environment.pip("uninstall", "--yes", "kimi-k3-mlx")
    assert environment.files() == environment.before
    assert not command.exists()
    assert environment.who() == ("nobody", HOSTS_OWN)


def test_editable_install(environment: Environment):
    environment.install("--no-build-isolation", "--editable", ROOT)
    assert environment.files() - environment.before >= STARTUP_FILES
    ours = ROOT / "kimi_k3" / "models" / "kimi_k3.py"
    assert environment.who() == ("start-up file", ours)
    environment.pip("uninstall", "--yes", "kimi-k3-mlx")
    assert environment.files() == environment.before


def test_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]):
    with zipfile.ZipFile(built["wheel"]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "kimi_k3").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == package | STARTUP_FILES
    assert "kimi_k3/py.typed" in names


def test_sdist_holds_what_building_and_testing_need(built: dict[str, Path]):
    with tarfile.open(built["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "kimi_k3", "packaging", "tests", "scripts", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    wanted = set(tracked.stdout.split()) if tracked.returncode == 0 else set()
    wanted |= {"pyproject.toml", "LICENSE", "README.md", "packaging/kimi_k3_mlx.pth"}
    assert wanted <= names
