"""The scripts that set up, test and release exist and say what they should."""

import os
import re
from pathlib import Path

import pytest
import yaml
from fresh_python import run_command

import kimi_k3

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_changelog_has_notes_for_this_version():
    done = run_command([ROOT / "scripts" / "release-notes", kimi_k3.__version__])
    assert done.returncode == 0, done.stderr
    assert "### Added" in done.stdout
    assert "## [" not in done.stdout.replace("### ", "")


def test_no_notes_is_an_error():
    done = run_command([ROOT / "scripts" / "release-notes", "0.0"])
    assert done.returncode == 1
    assert "no section [0.0]" in done.stderr


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_workflows_call_scripts_that_exist(file: Path):
    jobs = yaml.safe_load(file.read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    commands = "\n".join(step.get("run", "") for step in steps)
    called = set(re.findall(r"(?:scripts|\.ci)/[\w-]+", commands))
    assert called
    for name in called:
        assert os.access(ROOT / name, os.X_OK), f"{name} is not an executable file"


def test_ci_runs_the_test_command_of_the_readme():
    commands = (ROOT / ".ci" / "run").read_text().splitlines()
    assert commands[-1].startswith("scripts/test")
