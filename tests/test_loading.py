"""``kimi_k3.load``: ours, checked first, and no file of a checkpoint is executed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import mlx.core as mx
import mlx_lm
import pytest
from closeness import assert_same
from damage import copy_folder
from fresh_python import run_python
from loading import load_stored
from mlx_lm.generate import stream_generate
from tiny_k3 import T2_COUNTS, write_t1, write_t2

import kimi_k3
from kimi_k3.errors import (
    CheckpointError,
    ConfigError,
    ForeignCheckpointError,
    RegistrationError,
    TokenizerError,
)
from kimi_k3.loading import find_folder
from kimi_k3.nano.tokenizer_files import write_tokenizer

IDS = mx.array([[5, 1, 80, 33, 2, 17, 41]])


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T1 with a tokenizer."""
    folder = write_t1(tmp_path_factory.mktemp("t1"))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def two_bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T2 with a tokenizer: 12, 9, 16 and 7 experts behind a dense layer."""
    folder = write_t2(tmp_path_factory.mktemp("t2"))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Path:
    return copy_folder(source, tmp_path / "copy")


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}


@pytest.mark.parametrize("kind", ["source", "two_bank"])
def test_a_folder_loads(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    before = snapshot(folder)
    model, tokenizer = kimi_k3.load(folder)
    assert type(model).__module__ == "kimi_k3.models.kimi_k3"
    assert tokenizer.decode(tokenizer.encode("message 你好")) == "message 你好"
    assert_same(model(IDS), load_stored(folder)(IDS), where="logits")
    assert snapshot(folder) == before, "something was written beside the checkpoint"
    text = [r.token for r in stream_generate(model, tokenizer, "hello", max_tokens=5)]
    assert len(text) > 0


def test_text_as_path_and_lazy(source: Path) -> None:
    before = mx.get_active_memory()
    model, _ = kimi_k3.load(str(source), lazy=True)
    assert mx.get_active_memory() - before < 100_000
    assert model(IDS).shape == (1, 7, 576)


def test_both_end_ids_stop_whatever_the_config_says(copy: Path) -> None:
    """B18: one id in config.json, no generation_config.json."""
    (copy / "generation_config.json").unlink()
    for stated in (None, 321, 322, 7):
        damage.edit_config(copy, lambda c, stated=stated: c.update(eos_token_id=stated))
        _, tokenizer = kimi_k3.load(copy, lazy=True)
        ends = {tokenizer.convert_tokens_to_ids(n) for n in ("[EOS]", "<|end_of_msg|>")}
        assert ends == {321, 322}
        assert tokenizer.eos_token_ids >= ends


def test_the_folder_is_checked_before_anything_is_read(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("mlx-lm was asked")

    monkeypatch.setattr(mlx_lm, "load", never)
    (copy / "model-00002-of-000003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-000003.safetensors"):
        kimi_k3.load(copy)


def test_a_folder_without_tokenizer_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json cannot be read"):
        kimi_k3.load(write_t1(tmp_path))


def test_no_tokenizer_class_is_refused(copy: Path) -> None:
    damage.edit_json(
        copy / "tokenizer_config.json", lambda config: config.pop("tokenizer_class")
    )
    with pytest.raises(TokenizerError, match="tokenizer_class is None"):
        kimi_k3.load(copy)


# Code of the checkpoint

TRAPS = (
    "modeling_kimi_k3.py",
    "configuration_kimi_k3.py",
    "tokenization_kimi.py",
    "modeling.py",
    "__init__.py",
    "sitecustomize.py",
)


@pytest.fixture
def trapped(copy: Path) -> tuple[Path, Path]:
    """A checkpoint whose every Python file leaves a mark when it runs; the mark."""
    mark = copy.parent / "executed"
    for name in TRAPS:
        (copy / name).write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")

    def name_them(config: dict[str, Any]) -> None:
        config["auto_map"] = {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        }

    damage.edit_config(copy, name_them)
    return copy, mark


@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}])
def test_no_python_file_of_a_checkpoint_runs(
    trapped: tuple[Path, Path], options: dict[str, Any]
) -> None:
    folder, mark = trapped
    model, tokenizer = kimi_k3.load(folder, tokenizer_config=options)
    assert type(model).__module__ == "kimi_k3.models.kimi_k3"
    assert type(tokenizer._tokenizer).__module__.startswith("kimi_k3.")
    assert not mark.exists()


def test_mlx_lm_is_told_not_to_trust(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    load = mlx_lm.load

    def noted(*args: Any, **kwargs: Any) -> Any:
        given.update(kwargs)
        return load(*args, **kwargs)

    monkeypatch.setattr(mlx_lm, "load", noted)
    options = {"trust_remote_code": True, "padding_side": "left"}
    kimi_k3.load(source, lazy=True, tokenizer_config=options)
    assert given["trust_remote_code"] is False
    assert given["tokenizer_config"] == {**options, "trust_remote_code": False}
    assert options["trust_remote_code"] is True, "the caller's own was changed"


def test_traps_do_spring(trapped: tuple[Path, Path]) -> None:
    """Broken twin: a Python that runs one of the files leaves the mark."""
    folder, mark = trapped
    assert run_python([folder / "modeling.py"]).returncode == 0
    assert mark.read_text() == "modeling.py"


def test_a_model_file_is_refused_and_not_run(trapped: tuple[Path, Path]) -> None:
    folder, mark = trapped
    damage.edit_config(folder, lambda config: config.update(model_file="modeling.py"))
    with pytest.raises(CheckpointError, match=r"'modeling\.py'.*never executed"):
        kimi_k3.load(folder)
    with pytest.raises(ValueError, match="trust_remote_code"):
        kimi_k3.load(
            copy_without(folder, "model_file"),
            model_config={"model_file": "modeling.py"},
        )
    assert not mark.exists()


def copy_without(folder: Path, key: str) -> Path:
    damage.edit_config(folder, lambda config: config.pop(key))
    return folder


# Other doors shut


def test_switched_off_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_K3_MLX", "off")
    with pytest.raises(RegistrationError, match="KIMI_K3_MLX=off is set"):
        kimi_k3.load(source)


def test_another_class_is_not_taken_for_ours(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm, "load", lambda *a, **k: (Path("x"), None))
    with pytest.raises(RegistrationError, match="mlx-lm loaded its own class"):
        kimi_k3.load(source)


@pytest.mark.parametrize(
    "name", ["./nothing", "/nothing/here", "~/nothing-here", "a/b/c", "../x"]
)
def test_a_path_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="is not there. Name a checkpoint folder"):
        kimi_k3.load(name)


# The hub


class Hub:
    """Stands in for mlx-lm's download; notes what was asked for."""

    def __init__(self, folder: Path | Exception):
        self.folder = folder
        self.asked: list[tuple[str, str | None, list[str]]] = []

    def __call__(
        self, name: str, revision: str | None = None, allow_patterns: Any = None
    ) -> Path:
        self.asked.append((name, revision, allow_patterns))
        if isinstance(self.folder, Exception):
            raise self.folder
        return self.folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path | Exception], Hub]:
    def install(folder: Path | Exception) -> Hub:
        hub = Hub(folder)
        monkeypatch.setattr("mlx_lm.utils._download", hub)
        return hub

    return install


def test_a_repository_is_downloaded_without_its_code(source: Path, hub: Any) -> None:
    asked = hub(source).asked
    assert find_folder("owner/kimi-k3", "v2") == source
    (first, second) = asked
    assert first == ("owner/kimi-k3", "v2", ["config.json"])
    assert second[:2] == first[:2]
    assert {"*.json", "model*.safetensors", "tiktoken.model"} <= set(second[2])
    assert not any(pattern.endswith(".py") for pattern in second[2])


def test_another_model_is_refused_before_its_weights(tmp_path: Path, hub: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    asked = hub(tmp_path).asked
    with pytest.raises(ForeignCheckpointError, match="a 'llama' model"):
        kimi_k3.load("owner/some-llama")
    assert len(asked) == 1


@pytest.mark.parametrize("error", [OSError("offline\nmore"), ValueError("bad name")])
def test_a_repository_that_the_hub_does_not_give(error: Exception, hub: Any) -> None:
    hub(error)
    with pytest.raises(
        CheckpointError, match=r"owner/x is no folder here.*(offline|bad)"
    ):
        kimi_k3.load("owner/x")


# Options


def test_adapters_are_applied(source: Path, tmp_path: Path) -> None:
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model, _ = kimi_k3.load(source)
    plain = model(IDS)
    layers = {"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.o_proj"]}
    linear_to_lora_layers(model, 2, layers)
    lora = {}
    for i in (3, 4):
        wrapped = model.layers[i].self_attn.o_proj
        wrapped.lora_b = mx.ones_like(wrapped.lora_b)
        at = f"language_model.model.layers.{i}.self_attn.o_proj."
        lora |= {f"{at}lora_a": wrapped.lora_a, f"{at}lora_b": wrapped.lora_b}
    mx.save_safetensors(str(tmp_path / "adapters.safetensors"), lora)
    (tmp_path / "adapter_config.json").write_text(
        '{"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": '
        '{"rank": 2, "scale": 10.0, "dropout": 0.0, "keys": ["self_attn.o_proj"]}}'
    )
    adapted, _ = kimi_k3.load(source, adapter_path=tmp_path)
    assert_same(adapted(IDS), model(IDS), where="logits")
    with pytest.raises(AssertionError, match="differ"):
        assert_same(adapted(IDS), plain, where="logits")


def test_model_config_replaces_values(source: Path) -> None:
    with pytest.raises(ConfigError, match=r"text_config\.vocab_size is missing"):
        kimi_k3.load(source, model_config={"text_config": {}})


# Per-layer expert counts (B37)


def test_uneven_experts_generate_save_and_reload(
    two_bank: Path, tmp_path: Path
) -> None:
    config = json.loads((two_bank / "config.json").read_text())
    assert config["text_config"]["expert_counts"] == [0, *T2_COUNTS]
    model: Any
    model, tokenizer, *_ = mlx_lm.load(str(two_bank))
    counts = [layer.mlp.gate.weight.shape[0] for layer in model.layers[1:]]
    assert counts == list(T2_COUNTS)
    tokens = [r.token for r in stream_generate(model, tokenizer, "a", max_tokens=8)]
    assert tokens

    from mlx_lm.utils import save

    want = model(IDS)
    saved = tmp_path / "saved"
    save(saved, two_bank, model, tokenizer, config, donate_model=False)
    for load in (kimi_k3.load, lambda folder: mlx_lm.load(str(folder))[:2]):
        again, _ = load(saved)
        assert_same(again(IDS), want, where="logits")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([0, 12, 9, 16], r"expert_counts has 4 entries but the model has 5 layers"),
        ([12, 9, 16, 7, 0], r"layer 0: expert_counts says 12 .* is dense"),
        ([0, 12, 9, 16, 3], r"layer 4 keeps 3 experts but the router picks 4"),
        ([0, 12, 9, 16, 0], r"layer 4 keeps 0 experts but the router picks 4"),
        ([0, 12, 9, 16, -7], r"layer 4 keeps -7 experts"),
        ([0, 12, 9, 16, 7.0], r"expert_counts is .*wanted a list of whole numbers"),
        ([0, 12, 10, 16, 7], r"layer 2: .*expert_counts says 10 .* hold 9 "),
        ([0, 12, 9, 15, 7], r"layer 3: .*expert_counts says 15 .* hold 16 "),
    ],
)
def test_counts_that_contradict(
    two_bank: Path, tmp_path: Path, counts: list, message: str
) -> None:
    folder = copy_folder(two_bank, tmp_path / "copy")
    damage.edit_text_config(folder, expert_counts=counts)
    for load in (kimi_k3.load, lambda folder: mlx_lm.load(str(folder))):
        with pytest.raises((ConfigError, CheckpointError), match=message):
            load(folder)
