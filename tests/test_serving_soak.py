"""benchmarks/serving_soak.py: the server's memory stays flat, in short and as kept."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kimi_k3.build.samples import load_tokenizer
from kimi_k3.nano import NANO_FOLDER

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
COMMAND = [sys.executable, str(BENCHMARKS / "serving_soak.py")]
RESULTS = BENCHMARKS / "results"
KEPT = json.loads((RESULTS / "serving_soak.json").read_text())
LONGER = json.loads((RESULTS / "serving_soak_longer.json").read_text())

#: What memory may rise in the short form: of few readings each is off by some MB.
SHORT_LIMIT_MB = 20


@pytest.fixture(scope="module")
def benchmark() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return import_module("serving_soak")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
def test_the_short_form():
    done = subprocess.run(
        [*COMMAND, "--short", "--limit-mb", str(SHORT_LIMIT_MB)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *said, last = done.stdout.splitlines()
    result = json.loads(last)
    assert result["growth_mb_after_warm_up"] <= SHORT_LIMIT_MB
    assert [reading["requests"] for reading in result["short"]] == [20, 40]
    assert result["long"][-1]["tokens"] == 60
    assert sum("s left" in line for line in said) == len(result["short"]) + 10
    assert result.keys() == KEPT.keys()


def test_the_help_teaches():
    done = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True)
    for words in ("--out benchmarks/results/serving_soak.json", "--short", "stay flat"):
        assert words in done.stdout


def readings(*resident: float) -> list[dict[str, float]]:
    return [
        {"requests": 10.0 * number, "resident_mb": each}
        for number, each in enumerate(resident, 1)
    ]


def test_growth(benchmark: Any):
    """What fills up at first and what is held for a moment is no growth; a leak is."""
    flat = [155.0, 163.0, 154.0, 158.0] * 5
    filling = [80.0, 120.0, 140.0, 150.0]
    assert abs(benchmark.growth_mb(readings(*filling, *flat))) < 5
    leaking = [each + number for number, each in enumerate(flat)]
    assert benchmark.growth_mb(readings(*filling, *leaking)) > 10


def test_what_is_kept(benchmark: Any):
    """A thousand requests and 3,000 tokens on flat memory, by the command that it names."""
    assert KEPT["command"] == (
        "python benchmarks/serving_soak.py --requests 1000 --tokens 3000"
    )
    assert KEPT["short"][-1]["requests"] == 1000
    assert KEPT["long"][-1]["tokens"] == 3000
    assert KEPT["growth_mb_after_warm_up"] == benchmark.growth_mb(KEPT["short"])
    assert KEPT["growth_mb_after_warm_up"] < 10
    long = [reading["resident_mb"] for reading in KEPT["long"]]
    assert max(long) - min(long) < 5


def test_what_is_kept_of_the_longer_run(benchmark: Any):
    """Once the process has settled, 2,400 requests add nothing."""
    assert LONGER["command"] == (
        "python benchmarks/serving_soak.py --requests 3000 --tokens 300"
    )
    assert LONGER["short"][-1]["requests"] == 3000
    assert LONGER["growth_mb_after_warm_up"] == benchmark.growth_mb(LONGER["short"])
    assert LONGER["growth_mb_after_warm_up"] < 1


def test_no_control_id_is_left_to_the_long_answer(benchmark: Any):
    controls = load_tokenizer(NANO_FOLDER).all_special_ids
    assert set(benchmark.NO_CONTROL_IDS) == {str(i) for i in controls}
