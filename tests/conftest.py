"""Options and fixtures of all tests; float32 means float32 (no TF32) in all of them."""

import os
from pathlib import Path

os.environ["MLX_ENABLE_TF32"] = "0"

import pytest
from golden_data import Case, case_folders


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--extra-data",
        metavar="DIR",
        default=None,
        help="folder with golden/ and formats/ whose cases run besides tests/data",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give ``golden`` every golden case and ``build`` every build of the wild."""
    extra = metafunc.config.getoption("--extra-data")
    for fixture, kind in (("golden", "golden"), ("build", "formats")):
        if fixture in metafunc.fixturenames:
            folders = case_folders(kind, extra)
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
def build(request: pytest.FixtureRequest) -> Case:
    """A build of the wild with the logits expected of it."""
    return Case(request.param)


@pytest.fixture(scope="session")
def extra_data(request: pytest.FixtureRequest) -> Path | None:
    """The folder given as ``--extra-data``, if any."""
    given = request.config.getoption("--extra-data")
    return Path(given) if given else None
