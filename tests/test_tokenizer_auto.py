"""What transformers gives for a K3 folder, and for others, whatever is trusted.

Each batch of loads runs in its own process through mlx-lm's ``load_tokenizer``, with
stdin closed and with a cache of its own for the code that transformers copies.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fresh_python import run_python
from tokenizer_folders import edit_json, set_traps, write_tk
from transformers import AutoConfig, AutoTokenizer
from transformers.models.auto.tokenization_auto import REGISTERED_TOKENIZER_CLASSES

from kimi_k3.errors import KimiK3Error
from kimi_k3.tokenizer import auto, register_tokenizer
from kimi_k3.tokenizer.tokenizer import TikTokenTokenizer

PROGRAM = Path(__file__).with_name("programs") / "load_tokenizers.py"

TRUST = {"unset": None, "False": False, "True": True}

OURS = {"module": "kimi_k3", "class": "TikTokenTokenizer"}
REMOTE = {"module": "transformers_modules", "class": "TikTokenTokenizer"}


def load_all(
    cases: Sequence[tuple[Path, bool | None]], scratch: Path, **environment: str
) -> list[dict[str, Any]]:
    """What each folder gave, loaded one after the other in one new process."""
    arguments = json.dumps([(str(folder), trust) for folder, trust in cases])
    results = scratch / "results.json"
    run = run_python(
        [PROGRAM, arguments, results],
        {"HF_HOME": str(scratch / "hf"), "HF_HUB_OFFLINE": "1", **environment},
    )
    assert run.returncode == 0, run.stderr
    assert "Do you wish to run" not in run.stdout or "error" in results.read_text()
    return json.loads(results.read_text())


def trapped(folder: Path, model_type: str = "kimi_k3") -> tuple[Path, Path]:
    """A checkpoint that would run its own config and tokenizer; folder and mark."""
    write_tk(folder, model_type, eos_token_id=322)
    return folder, set_traps(folder)


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of all kinds of K3 folder, then of K3 and Kimi-K2 in turn; one process."""
    scratch = tmp_path_factory.mktemp("k3")
    cases = {}
    for name, trust in TRUST.items():
        for kind in ("right", "other", "absent"):
            folder, mark = trapped(scratch / f"{kind}-{name}")
            config = folder / "tokenizer_config.json"
            if kind == "other":
                edit_json(config, lambda c: c.update(tokenizer_class="KimiTokenizer"))
            elif kind == "absent":
                edit_json(config, lambda c: c.pop("tokenizer_class"))
            cases[kind, name] = (folder, trust, mark)
    for name, trust in TRUST.items():
        for key, model_type in (("again", "kimi_k3"), ("k2", "kimi_k2")):
            folder, mark = trapped(scratch / f"{key}-{name}", model_type)
            cases[key, name] = (folder, trust, mark)
    outcomes = load_all([case[:2] for case in cases.values()], scratch)
    return {
        key: (outcome, mark.exists())
        for (key, (_, _, mark)), outcome in zip(cases.items(), outcomes, strict=True)
    }


@pytest.mark.parametrize("trust", TRUST)
def test_right_class_is_ours_and_nothing_runs(k3, trust):
    outcome, ran = k3["right", trust]
    assert outcome.items() >= OURS.items()
    assert outcome["controls"] == list(range(320, 576))
    assert outcome["ends"] == [321, 322]
    assert not ran


@pytest.mark.parametrize("kind", ["other", "absent"])
@pytest.mark.parametrize("trust", ["unset", "False"])
def test_another_class_runs_nothing_without_trust(k3, kind, trust):
    outcome, ran = k3[kind, trust]
    assert not ran
    assert "error" in outcome


@pytest.mark.parametrize("kind", ["other", "absent"])
def test_another_class_runs_if_trusted(k3, kind):
    """The stock doors cannot be guarded there; those of this package refuse it."""
    outcome, ran = k3[kind, "True"]
    assert ran
    assert outcome.items() >= REMOTE.items()


@pytest.fixture(scope="module")
def k2_without_us(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("k2")
    folders = {name: trapped(scratch / f"k2-{name}", "kimi_k2") for name in TRUST}
    outcomes = load_all(
        [(folder, TRUST[name]) for name, (folder, _) in folders.items()],
        scratch,
        KIMI_K3_MLX="off",
    )
    return {
        name: (outcome, mark.exists())
        for (name, (_, mark)), outcome in zip(folders.items(), outcomes, strict=True)
    }


@pytest.mark.parametrize("trust", TRUST)
def test_kimi_k2_after_k3_is_as_without_us(k3, k2_without_us, trust):
    outcome, ran = k3["k2", trust]
    assert (outcome, ran) == k2_without_us[trust]
    assert ran == (trust == "True")
    assert ("error" in outcome) == (trust != "True")


@pytest.fixture
def clean_registry():
    register_tokenizer()
    yield
    auto.withdraw()


@pytest.mark.usefixtures("clean_registry")
def test_the_name_is_registered_only_while_it_is_needed(tmp_path):
    folder, _ = write_tk(tmp_path / "model")
    assert auto.CLASS_NAME not in REGISTERED_TOKENIZER_CLASSES
    AutoConfig.from_pretrained(folder)
    assert REGISTERED_TOKENIZER_CLASSES[auto.CLASS_NAME] is TikTokenTokenizer
    assert type(AutoTokenizer.from_pretrained(folder)) is TikTokenTokenizer
    assert auto.CLASS_NAME not in REGISTERED_TOKENIZER_CLASSES


@pytest.mark.usefixtures("clean_registry")
def test_a_load_that_fails_takes_the_name_back(tmp_path):
    folder, _ = write_tk(tmp_path / "model")
    (folder / "tiktoken.model").unlink()
    with pytest.raises(KimiK3Error, match=r"tiktoken\.model"):
        AutoTokenizer.from_pretrained(folder)
    assert auto.CLASS_NAME not in REGISTERED_TOKENIZER_CLASSES


@pytest.mark.usefixtures("clean_registry")
def test_another_thread_in_need_keeps_the_name():
    other = threading.Thread(target=auto.offer)
    other.start()
    other.join()
    auto.offer()
    auto.withdraw()
    assert auto.CLASS_NAME in REGISTERED_TOKENIZER_CLASSES
    auto._waiting.clear()


@pytest.mark.usefixtures("clean_registry")
@pytest.mark.parametrize("trust", [None, False])
def test_kimi_k2_after_a_k3_config_alone(tmp_path, monkeypatch, trust):
    """The name is still in place; ours steps aside and nothing runs."""
    folder, mark = trapped(tmp_path / "k2", "kimi_k2")
    AutoConfig.from_pretrained(write_tk(tmp_path / "k3")[0])
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    assert not mark.exists()
    assert auto.CLASS_NAME not in REGISTERED_TOKENIZER_CLASSES


@pytest.mark.usefixtures("clean_registry")
def test_no_network_is_asked(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr("socket.socket.connect", refuse)
    folder, _ = write_tk(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert type(tokenizer) is TikTokenTokenizer


def test_registering_twice_changes_nothing():
    register_tokenizer()
    register_tokenizer()
    assert AutoConfig.for_model("kimi_k3").__class__ is auto.KimiK3MlxConfig
    auto.withdraw()


@pytest.mark.usefixtures("clean_registry")
def test_the_release_config_is_read(tmp_path):
    """Nested and null entries of the real file are kept as they are."""
    from kimi_k3.checkpoint.source_layout import full_size_config

    folder, _ = write_tk(tmp_path / "model", **full_size_config())
    config = AutoConfig.from_pretrained(folder)
    assert config.model_type == "kimi_k3"
    assert config.text_config["num_hidden_layers"] == 93
    assert type(AutoTokenizer.from_pretrained(folder)) is TikTokenTokenizer
