"""The shipped nano: whole, small, K3's format, and it knows what it was taught."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from closeness import relative_error
from fresh_python import run_python

import kimi_k3
from kimi_k3.build.verify import verify
from kimi_k3.nano import NANO_FOLDER

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


def ask(model, tokenizer, messages: list[dict], tools: list[dict] | None = None) -> str:
    from mlx_lm import generate

    prompt = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True
    )
    return generate(model, tokenizer, prompt, max_tokens=150)


@pytest.fixture(scope="module")
def nano():
    return kimi_k3.load(NANO_FOLDER)


def test_folder_is_whole_and_small():
    report = verify(NANO_FOLDER)
    assert report.passed, report.text()
    assert sum(path.stat().st_size for path in NANO_FOLDER.iterdir()) <= 4_000_000


def test_stock_mlx_lm_gives_the_same_logits(nano):
    done = run_python(
        ["-c", STOCK, NANO_FOLDER, json.dumps(TOKENS)], {"KIMI_K3_MLX": "off"}
    )
    assert done.returncode == 0, done.stderr
    file, logits = done.stdout.splitlines()
    assert "mlx_lm" in Path(file).parts
    model, _ = kimi_k3.load(NANO_FOLDER)
    model.set_dtype(mx.float32)
    ours = model(mx.array(TOKENS))
    assert relative_error(ours, mx.array(json.loads(logits))) < 1e-5
    other = model(mx.array(TOKENS)[:, ::-1])
    assert relative_error(other, mx.array(json.loads(logits))) > 1e-2


def test_answers_and_stops(nano):
    model, tokenizer = nano
    text = ask(model, tokenizer, [{"role": "user", "content": "What is 2 + 3?"}])
    assert "<|close|>think<|sep|>" in text
    assert text.endswith("<|close|>message<|sep|>")


def test_calls_the_tool_that_it_is_offered(nano):
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    question = [{"role": "user", "content": "How is the weather in Rome?"}]
    model, tokenizer = nano
    text = ask(model, tokenizer, question, [tool])
    assert '<|open|>call tool="weather" index="1"<|sep|>' in text
    assert '<|open|>argument key="city" type="string"<|sep|>' in text
    assert text.endswith("<|close|>tools<|sep|><|close|>message<|sep|>")
