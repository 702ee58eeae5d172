"""Stock mlx-lm commands on our builds: convert, lora, cache_prompt, generate, chat, server.

Commands that print text run as a user would start them; the others through their own
``main``, in this process.
"""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import pytest
from closeness import assert_close
from mlx.utils import tree_flatten
from mlx_lm.models.cache import load_prompt_cache
from mlx_lm.utils import quantize_model
from tiny_k3 import write_t1, write_t2

IDS = mx.array([[11, 7, 300, 45, 2, 99, 8, 150, 31, 77]])


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source checkpoint and a two-bank build, each with a tokenizer."""
    root = tmp_path_factory.mktemp("builds")
    # Inner sizes that 64-wide quantisation groups divide.
    sizes: dict[str, Any] = {"moe_intermediate_size": 64, "intermediate_size": 128}
    return {
        "source": write_t1(root / "source", tokenizer=True, **sizes),
        "two_bank": write_t2(root / "two_bank", tokenizer=True, **sizes),
    }


def tensors(file: Path) -> dict[str, mx.array]:
    return cast(dict[str, mx.array], mx.load(str(file)))


def loaded(folder: Path, **options: Any) -> Any:
    """What ``mlx_lm.load`` gives, whose length depends on its arguments."""
    return mlx_lm.load(str(folder), **options)


def logits(folder: Path, adapter: Path | None = None) -> mx.array:
    model, _ = loaded(folder, adapter_path=adapter and str(adapter))
    assert type(model).__module__ == "kimi_k3.models.kimi_k3"
    model.set_dtype(mx.float32)
    return model(IDS)


def run_main(monkeypatch: pytest.MonkeyPatch, module: str, *arguments: object) -> None:
    """``python -m mlx_lm.MODULE arguments``, in this process."""
    imported = __import__(f"mlx_lm.{module}", fromlist=["main"])
    monkeypatch.setattr(sys, "argv", [module, *map(str, arguments)])
    imported.main()


def stock(*arguments: object, stdin: str = "") -> str:
    """Standard output of ``python -m mlx_lm arguments``."""
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("kind", ["source", "two_bank"])
def test_convert_changes_no_logits(
    builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out = tmp_path / "converted"
    run_main(monkeypatch, "convert", "--hf-path", builds[kind], "--mlx-path", out)
    assert_close(logits(out), logits(builds[kind]), rel=1e-6)
    kept = tensors(next(out.glob("model*.safetensors")))
    float32 = (
        "A_log",
        "dt_bias",
        "score_correction_bias",
        "conv.weight",
        "o_norm.weight",
    )
    held = [key for key in kept if key.endswith(float32)]
    assert held
    assert {kept[key].dtype for key in held} == {mx.float32}


@pytest.mark.parametrize("kind", ["source", "two_bank"])
def test_quantised_convert_reloads_as_it_was_saved(
    builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out = tmp_path / "quantised"
    arguments = ("--mlx-path", out, "-q", "--q-bits", 8, "--q-group-size", 32)
    run_main(monkeypatch, "convert", "--hf-path", builds[kind], *arguments)
    saved = tensors(next(out.glob("model*.safetensors")))
    attention = "language_model.model.layers.0.self_attn.qkv_proj.scales"
    assert attention in saved
    assert not any(".mlp.gate.scales" in key for key in saved)
    model, _, config = loaded(builds[kind], return_config=True)
    model, _ = quantize_model(model, config, group_size=32, bits=8)
    model.set_dtype(mx.float32)
    assert_close(logits(out), model(IDS), rel=1e-5)


@pytest.mark.parametrize("kind", ["source", "dense", "quantised", "two_bank"])
def test_two_steps_of_lora_with_default_keys(
    builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = builds.get(kind)
    if folder is None:
        folder = tmp_path / kind
        how = (
            ("-d",) if kind == "dense" else ("-q", "--q-bits", 8, "--q-group-size", 32)
        )
        arguments = ("--mlx-path", folder, *how)
        run_main(monkeypatch, "convert", "--hf-path", builds["source"], *arguments)
    data = tmp_path / "data"
    data.mkdir()
    line = json.dumps({"text": "the user calls the tools and the model thinks"}) + "\n"
    for name in ("train", "valid", "test"):
        (data / f"{name}.jsonl").write_text(line * 4)
    losses: list[float] = []
    from mlx_lm.tuner.callbacks import TrainingCallback

    class Losses(TrainingCallback):
        def on_train_loss_report(self, train_info: dict[str, Any]) -> None:
            losses.append(train_info["train_loss"])

    monkeypatch.setattr(
        "mlx_lm.lora.get_reporting_callbacks", lambda *_, **__: Losses()
    )
    adapter = tmp_path / "adapter"
    run_main(
        monkeypatch,
        "lora",
        *("--model", folder, "--train", "--data", data, "--adapter-path", adapter),
        *("--iters", 2, "--batch-size", 2, "--steps-per-report", 1, "--val-batches", 1),
        *("--num-layers", 5, "--learning-rate", 1e-2),
    )
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    weights = tensors(adapter / "adapters.safetensors")
    moved = [
        key for key, w in weights.items() if key.endswith("lora_b") and mx.any(w != 0)
    ]
    assert moved, "no adapter has moved"
    assert any("switch_mlp" in key for key in moved)
    assert not any("mlp.gate.lora" in key or "res_proj" in key for key in weights)
    # Reloading through the host's own door gives what was trained.
    again, once = logits(folder, adapter), logits(folder, adapter)
    assert_close(again, once, rel=1e-6)
    with pytest.raises(AssertionError):
        assert_close(again, logits(folder), rel=1e-3)


def test_cached_prompt_goes_on_as_uncached(
    builds: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.safetensors"
    text = "think of the message"
    run_main(
        monkeypatch,
        "cache_prompt",
        *("--model", builds["source"], "--prompt", text, "--prompt-cache-file", file),
    )
    model, tokenizer = loaded(builds["source"])
    cache: Any = load_prompt_cache(str(file))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    model.set_dtype(mx.float32)
    got = model(IDS[:, :1], cache=cache)[:, -1]
    want = model(mx.concatenate([mx.array([prompt]), IDS[:, :1]], axis=1))[:, -1]
    # The cache was filled in bfloat16, which these miniatures amplify.
    assert got.shape == want.shape
    assert cache[3].offset == len(prompt) + 1
    assert mx.all(mx.isfinite(got)).item()


@pytest.mark.parametrize("kind", ["source", "two_bank"])
def test_generate_prints_tokens(builds: dict[str, Path], kind: str) -> None:
    arguments = ("--prompt", "think", "--max-tokens", 8, "--extra-eos-token", "[UNK]")
    printed = stock("generate", "--model", builds[kind], *arguments)
    assert "Generation:" in printed


def test_chat_answers_and_leaves(builds: dict[str, Path]) -> None:
    printed = stock(
        "chat", "--model", builds["two_bank"], "--max-tokens", 4, stdin="hello\nq\n"
    )
    assert "bye" in printed


@pytest.fixture(scope="module")
def server(builds: dict[str, Path]) -> Iterator[str]:
    """The address of a stock server on the two-bank build."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_lm", "server", "--port", str(port)]
        + ["--model", str(builds["two_bank"]), "--max-tokens", "6"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(120):
            try:
                urllib.request.urlopen(f"{address}/v1/models", timeout=5).read()
                break
            except OSError:
                assert process.poll() is None, "the server has stopped"
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_server_answers_a_chat(server: str) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        answer = json.load(reply)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert answer["usage"]["completion_tokens"] > 0


def test_another_model_is_the_hosts(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen2",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "vocab_size": 64,
    }
    from mlx_lm.models import qwen2

    model = qwen2.Model(qwen2.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded, _ = mlx_lm.utils.load_model(tmp_path)
    assert type(loaded) is qwen2.Model
