"""Options and fixtures of all tests; float32 means float32 (no TF32) in all of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["MLX_ENABLE_TF32"] = "0"

import pytest
from golden_data import Case, case_folders
from metalsim.toolchain import keep_programs_in
from simulated import need_kernels, run_kernels, why_no_kernels, why_no_simulator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extra-data",
        metavar="DIR",
        default=None,
        help="folder with golden/ and formats/ whose cases run besides tests/data",
    )
    parser.addoption(
        "--require-clang",
        action="store_true",
        help="fail, instead of skip, where Metal kernels cannot be simulated",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Keep simulated kernels between runs, beside pytest's own notes."""
    cache = getattr(config, "cache", None)
    if cache is not None:
        keep_programs_in(cache.mkdir("metalsim"))


#: Fixture, kind of folder it goes through, and the file that such a folder must have.
PARAMETRISED = (
    ("golden", "golden", "golden_text.safetensors"),
    ("padded_golden", "golden", "golden_leftpad.safetensors"),
    ("build", "formats", "expected_logits.safetensors"),
    ("broken", "formats/broken", "config.json"),
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each fixture of ``PARAMETRISED`` every folder it goes through."""
    extra = metafunc.config.getoption("--extra-data")
    for fixture, kind, needed in PARAMETRISED:
        if fixture in metafunc.fixturenames:
            folders = [f for f in case_folders(kind, extra) if (f / needed).exists()]
            metafunc.parametrize(
                fixture,
                folders,
                ids=[folder.name for folder in folders],
                indirect=True,
                scope="session",
            )


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Case:
    """A source checkpoint with the outputs of Moonshot's code."""
    return Case(request.param)


@pytest.fixture(scope="session")
def padded_golden(request: pytest.FixtureRequest) -> Case:
    """A golden case that also has a left-padded batch."""
    return Case(request.param)


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest) -> Case:
    """A build of the wild with the logits expected of it."""
    return Case(request.param)


@pytest.fixture(scope="session")
def broken(request: pytest.FixtureRequest) -> Path:
    """The folder of a build that must be refused."""
    return request.param


@pytest.fixture(scope="session")
def extra_data(request: pytest.FixtureRequest) -> Path | None:
    """The folder given as ``--extra-data``, if any."""
    given = request.config.getoption("--extra-data")
    return Path(given) if given else None


@pytest.fixture
def simulator(request: pytest.FixtureRequest) -> None:
    """The test needs clang, GPU or not."""
    need_kernels(bool(request.config.getoption("--require-clang")), why_no_simulator())


@pytest.fixture
def simulated_kernels(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``simulated.run_kernels``; skips where kernels cannot run at all."""
    need_kernels(bool(request.config.getoption("--require-clang")), why_no_kernels())
    return run_kernels
