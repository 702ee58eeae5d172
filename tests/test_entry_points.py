"""Every door of mlx-lm gets our class for kimi_k3, and its own for other models.

T0 in mlx-lm's own layout, T1 in the release's, T2 with two banks (mlx-lm cannot load it).
"""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from fresh_python import (
    class_files,
    environment_with,
    installed_command,
    run_command,
    run_python,
    witness,
)
from tiny_k3 import t0_config, t0_model, write_t1, write_t2, write_tk

import kimi_k3

OURS = str(Path(kimi_k3.__file__).parent / "models" / "kimi_k3.py")
HOSTS_OWN = str(Path(mlx_lm.__file__ or "").parent / "models" / "kimi_k3.py")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """T0, T1 and T2, each with the tokenizer TK."""
    from mlx_lm.utils import save_config, save_model

    root = tmp_path_factory.mktemp("checkpoints")
    t0 = write_tk(root / "T0")
    save_model(t0, t0_model())
    save_config(t0_config(), t0 / "config.json")
    write_t1(root / "T1", tokenizer=True)
    write_t2(root / "T2", tokenizer=True)
    return {name: root / name for name in ("T0", "T1", "T2")}


LOAD = """
import inspect, sys, mlx_lm
for folder in sys.argv[1:]:
    model, tokenizer = mlx_lm.load(folder)
    print(inspect.getfile(type(model)))
"""


def test_load(folders: dict[str, Path]):
    done = run_python(["-c", LOAD, *folders.values()])
    assert done.stdout.splitlines() == [OURS] * 3, done.stderr


def test_load_with_the_hosts_module_hidden(folders: dict[str, Path], tmp_path: Path):
    hidden = witness(tmp_path, hide_host=True)
    done = run_python(["-c", LOAD, *folders.values()], hidden)
    assert done.stdout.splitlines() == [OURS] * 3, done.stderr
    # With the switch off nobody is left to answer: the module was really hidden.
    done = run_python(["-c", LOAD, folders["T0"]], hidden | {"KIMI_K3_MLX": "off"})
    assert done.returncode != 0
    assert "Model type kimi_k3 not supported" in done.stderr


def test_switch_off_is_mlx_lm_alone(folders: dict[str, Path]):
    code = """
import inspect, sys
from pathlib import Path
from mlx_lm.utils import load_model
print(inspect.getfile(type(load_model(Path(sys.argv[1]))[0])))
load_model(Path(sys.argv[2]))
"""
    pair = (folders["T0"], folders["T2"])
    done = run_python(["-c", code, *pair], {"KIMI_K3_MLX": "off"})
    assert done.stdout.splitlines() == [HOSTS_OWN]
    assert done.returncode != 0
    assert "bank_hi" in done.stderr


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("T0", [installed_command("mlx_lm.generate")]),
        ("T1", [sys.executable, "-m", "mlx_lm", "generate"]),
        ("T2", [installed_command("mlx_lm.generate")]),
        ("T2", [installed_command("kimi-k3"), "run", "mlx_lm.generate"]),
    ],
)
def test_generate_command(
    name: str, command: list[str | Path], folders: dict[str, Path], tmp_path: Path
):
    options = ["--prompt", "hello", "--max-tokens", "4"]
    done = run_command(
        [*command, "--model", folders[name], *options], witness(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert "Generation: " in done.stdout
    assert class_files(tmp_path) == [OURS]


def test_launched_ranks(folders: dict[str, Path], tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(LOAD)
    launch = [installed_command("mlx.launch"), "-n", "2", "--backend", "ring", "--"]
    done = run_command(
        [*launch, sys.executable, script, folders["T2"]], witness(tmp_path)
    )
    assert done.stdout.split().count(OURS) == 2, done.stderr
    assert class_files(tmp_path) == [OURS] * 2


@pytest.fixture
def server(folders: dict[str, Path], tmp_path: Path) -> Iterator[str]:
    """Address of the stock server that serves T2."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [installed_command("mlx_lm.server"), "--port", port]
    with (tmp_path / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*command, "--model", folders["T2"]],
            env=environment_with(witness(tmp_path)),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_server(server: str, tmp_path: Path):
    body = {"prompt": "hello", "max_tokens": 3, "temperature": 0}
    request = urllib.request.Request(
        f"{server}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    answer = {}
    for _ in range(300):
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
            break
        except OSError:
            time.sleep(0.1)
    assert answer["usage"]["completion_tokens"] == 3, (tmp_path / "log.txt").read_text()


def test_second_door_without_start_up_files(folders: dict[str, Path]):
    """``kimi-k3 run`` in a Python that reads none, on a build that only we can load."""
    code = f"""
import sys
sys.path[:0] = {[str(Path(OURS).parents[2]), *sys.path]!r}
from kimi_k3.cli import main
main(["run", "mlx_lm.generate", *sys.argv[1:]])
import inspect, mlx_lm.models.kimi_k3
print(inspect.getfile(mlx_lm.models.kimi_k3.Model))
"""
    options = ["--prompt", "hello", "--max-tokens", "4"]
    done = run_python(["-S", "-c", code, "--model", folders["T2"], *options])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == OURS


def test_other_models_are_untouched(tmp_path: Path):
    """A Qwen2 is the host's, and computes the same with our package as without."""
    from mlx_lm.models.qwen2 import Model, ModelArgs
    from mlx_lm.utils import save_model

    config = {
        "model_type": "qwen2",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
    }
    mx.random.seed(0)
    save_model(tmp_path, Model(ModelArgs.from_dict(config)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = """
import inspect, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
print(inspect.getfile(type(model)))
print(model(mx.array([[1, 2, 3]])).tolist())
print("mlx_lm.models.kimi_k3" in sys.modules, "kimi_k3.models" in sys.modules)
"""
    ours = run_python(["-c", code, tmp_path])
    alone = run_python(["-c", code, tmp_path], {"KIMI_K3_MLX": "off"})
    file, _, loaded = ours.stdout.splitlines()
    assert file == str(Path(HOSTS_OWN).with_name("qwen2.py"))
    assert loaded == "False False"
    assert ours.stdout == alone.stdout
