"""The guide's commands for nano, as they stand there, with every long step killed once.

Only the text is shorter than the guide's, in the mix and in the rows that probes read:
calibrating and probing take the longest and are tested by themselves.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kimi_k3
from kimi_k3.planning.expert_plan import ExpertPlan

REPOSITORY = Path(__file__).parents[1]
GUIDE = REPOSITORY / "docs" / "making-a-build.md"
KINDS = ("uniform", "global", "graded", "budget")

#: Starts each long step, kills it as soon as part of its work is kept, and runs it again
#: as the guide says. ``killed`` gets a line for each that was still running.
KILL_FIRST = r"""
set -euo pipefail
kimi-k3() {
  local verb=$1 kept=
  if [ $verb = damage ]; then set -- "$@" --probe-tokens 320; fi
  case $verb in
    calibrate) kept="${*: -1}/partial/layer-001.npz" ;;
    damage) kept="$3/damage-partial/layer-001.npz" ;;
    convert) kept="$3/model-00002-of-*.safetensors" ;;
  esac
  if [ -n "$kept" ]; then
    command kimi-k3 "$@" &
    local process=$!
    while kill -0 $process 2>/dev/null && ! compgen -G "$kept" >/dev/null; do
      sleep 0.01
    done
    kill -9 $process 2>/dev/null || true
    wait $process || { [ $? = 137 ] && echo "$verb" >> killed; }
    if [ $verb = convert ]; then set -- "$@" --resume; fi
  fi
  command kimi-k3 "$@"
}
"""


def commands() -> str:
    """The guide's block for nano, without the setting up."""
    found = re.search(r"<!-- nano -->\n```sh\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found
    first, _, rest = found[1].partition("\n")
    assert first == "scripts/setup && . .venv/bin/activate"
    return rest


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands were run."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "kimi_k3").symlink_to(Path(kimi_k3.__file__).parent)
    nano = folder / "benchmarks" / "nano"
    nano.mkdir(parents=True)
    shutil.copytree(REPOSITORY / "benchmarks/nano/samples", nano / "samples")
    mix = (REPOSITORY / "benchmarks/nano/mix.toml").read_text()
    assert "tokens = 32768\n" in mix
    assert "length = 512\n" in mix
    mix = mix.replace("tokens = 32768\n", "tokens = 2560\n")
    mix = mix.replace("length = 512\n", "length = 64\n")
    (nano / "mix.toml").write_text(mix)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", KILL_FIRST + commands()],
        cwd=folder,
        env=os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    (folder / "stdout").write_text(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_the_guide_has_every_step_and_kind():
    text = commands()
    for verb in ("calibrate", "damage", "plan", "convert", "verify"):
        assert f"kimi-k3 {verb} " in text
    assert "mlx_lm.generate --model" in text
    assert set(re.findall(r"--kind (\w+)", text)) == set(KINDS)


def test_every_long_step_was_killed_and_went_on(folder: Path):
    killed = (folder / "killed").read_text().split()
    assert set(killed) == {"calibrate", "damage", "convert"}


def test_every_build_is_whole_and_answers(folder: Path):
    out = (folder / "stdout").read_text()
    assert out.count("This build is whole, and what its record says it is.") == len(
        KINDS
    )
    assert len(re.findall(r"Generation: \d+ tokens", out)) == len(KINDS)


def test_every_build_is_what_its_plan_says(folder: Path):
    for kind in KINDS:
        plan = ExpertPlan.load(folder / f"nano-builds/{kind}.json")
        config = json.loads((folder / f"nano-builds/{kind}/config.json").read_text())
        assert plan.about["kind"] == kind
        assert ExpertPlan.from_dict(config["conversion"]["plan"]).digest == plan.digest


def test_the_budget_was_planned_by_what_was_probed(folder: Path):
    about = ExpertPlan.load(folder / "nano-builds/budget.json").about
    assert about["measured"]
    assert about["probes"]
