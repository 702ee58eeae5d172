"""Converted builds in the hosts: equal logits with and without this package, offline."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from closeness import relative_error
from fresh_python import run_python
from loading import load_float32
from tiny_k3 import write_t1

from kimi_k3 import convert
from kimi_k3.checkpoint.folder import read_config
from kimi_k3.config import ModelArgs
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.planning.expert_plan import ExpertPlan, LayerPlan

TOKENS = [[7, 300, 12, 99, 5, 250, 31, 8, 44, 600, 71, 2, 90, 111, 400, 3]]

#: Loads the folder with mlx-lm alone and prints float32 logits.
STOCK = """
import json, sys
from pathlib import Path
import mlx.core as mx
from mlx_lm.utils import load_model
model, _ = load_model(Path(sys.argv[1]))
model.set_dtype(mx.float32)
print(sys.modules[type(model).__module__].__file__)
print(json.dumps(model(mx.array(json.loads(sys.argv[2]))).tolist()))
"""

#: One turn through mlx-lm, as a user of it writes it.
CHAT = """
import sys
from mlx_lm import generate, load
model, tokenizer = load(sys.argv[1])
prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "What is 2 + 3?"}], add_generation_prompt=True
)
print(sys.modules[type(model).__module__].__file__)
print(repr(generate(model, tokenizer, prompt, max_tokens=100)))
"""

#: mlx-vlm's own model and processor; text only, until this package serves them too.
VISION = """
import sys
import mlx.core as mx
from mlx_vlm import load
model, processor = load(sys.argv[1])
ids = processor.tokenizer.encode("What is 2 + 3?")
logits = model(mx.array([ids]), pixel_values=None).logits
print(bool(mx.isfinite(logits).all()), logits.shape[:2] == (1, len(ids)))
"""


def uniform(source: Path, keep: int, **fields: Any) -> ExpertPlan:
    text = ModelArgs.from_dict(read_config(source)).text_config
    whole = ExpertPlan.identity(text)
    layers = {
        layer: LayerPlan(
            tuple(sorted((5 * i + layer) % text.num_experts for i in range(keep)))
        )
        for layer in whole.layers
    }
    return ExpertPlan(whole.experts, whole.top_k, layers, **fields)


def stock_logits(build: Path) -> mx.array:
    done = run_python(["-c", STOCK, build, json.dumps(TOKENS)], {"KIMI_K3_MLX": "off"})
    assert done.returncode == 0, done.stderr
    file, logits = done.stdout.splitlines()
    assert "mlx_lm" in Path(file).parts
    return mx.array(json.loads(logits))


@pytest.mark.parametrize("bits", [{}, {"kda.o_proj": 8, "lm_head": 6}], ids=str)
def test_a_uniform_build_gives_stock_mlx_lm_the_same_logits(
    bits: dict[str, int], tmp_path: Path
):
    """Only ``num_experts`` of the config changed, which any loader reads."""
    plan = uniform(NANO_FOLDER, 24, bits=bits)
    build = convert(NANO_FOLDER, tmp_path / "build", plan)
    text = read_config(build)["text_config"]
    before = read_config(NANO_FOLDER)["text_config"]
    assert text == {k: v for k, v in before.items() if k != "quantization_config"} | {
        "num_experts": 24
    }
    ours = load_float32(build)(mx.array(TOKENS))
    assert relative_error(ours, stock_logits(build)) < 1e-5
    whole = load_float32(NANO_FOLDER)(mx.array(TOKENS))
    assert relative_error(ours, whole) > 1e-3, "the plan changed nothing"


def test_the_identity_computes_what_the_source_computes(tmp_path: Path):
    build = convert(NANO_FOLDER, tmp_path / "build")
    one, other = (load_float32(f)(mx.array(TOKENS)) for f in (NANO_FOLDER, build))
    assert mx.array_equal(one, other)


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """B41: nano, converted, then alone in another place."""
    folder = tmp_path_factory.mktemp("before")
    source = Path(shutil.copytree(NANO_FOLDER, folder / "source"))
    build = convert(source, folder / "build", uniform(source, 28))
    elsewhere = tmp_path_factory.mktemp("after") / "moved"
    shutil.move(build, elsewhere)
    shutil.rmtree(folder)
    return elsewhere


@pytest.fixture
def offline(tmp_path: Path) -> dict[str, str]:
    """An environment without network, caches, or anything else to fall back on."""
    return {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "empty"),
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    }


def test_a_build_chats_offline_in_mlx_lm(moved: Path, offline: dict[str, str]):
    done = run_python(["-c", CHAT, moved], offline)
    assert done.returncode == 0, done.stderr
    file, text = done.stdout.splitlines()
    assert Path(file).parent.name == "models"
    assert "kimi_k3" in Path(file).parts
    assert "<|close|>think<|sep|>" in text
    assert text.endswith("<|close|>message<|sep|>'")


def test_without_its_vocabulary_it_does_not(
    moved: Path, offline: dict[str, str], tmp_path: Path
):
    """Broken twin of B41: the file that copy patterns forget."""
    copy = Path(shutil.copytree(moved, tmp_path / "copy"))
    (copy / "tiktoken.model").unlink()
    done = run_python(["-c", CHAT, copy], offline)
    assert done.returncode != 0
    assert "tiktoken.model" in done.stderr


def test_a_build_loads_offline_in_mlx_vlm(tmp_path: Path, offline: dict[str, str]):
    source = write_t1(tmp_path / "t1", tokenizer=True)
    build = convert(source, tmp_path / "build", uniform(source, 12))
    shutil.rmtree(source)
    done = run_python(["-c", VISION, build], offline)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True True"
