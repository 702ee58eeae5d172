"""Stock ``mlx_lm.evaluate`` and ``mlx_lm.perplexity`` on our builds, without a network.

Their numbers against sums over the model's own log-probabilities, and against ours.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import datasets.config
import lm_eval.evaluator
import mlx.core as mx
import mlx_lm.evaluate
import numpy as np
import pytest
from fresh_python import environment_with
from mlx_lm import convert, generate
from mlx_lm import load as mlx_load
from mlx_lm.perplexity import eval_ppl, load_data

from kimi_k3.build.sample_rows import Samples, tokenizer_fingerprint
from kimi_k3.build.samples import load_tokenizer
from kimi_k3.evaluation.evaluate import evaluate
from kimi_k3.evaluation.summary import Summary
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.nano.cache import demo_folders

DATA = Path(__file__).parent / "data" / "lm_eval"
DOCUMENTS = [
    json.loads(line)
    for line in (DATA / "questions.jsonl").read_text("utf-8").splitlines()
]
NO_THINKING = {"thinking": False}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The nano and its two-bank copy, as stock ``mlx_lm.convert`` makes them float32.

    In bfloat16 a row's roundings depend on the rows beside it.
    """
    root = tmp_path_factory.mktemp("builds")
    sources = {
        "nano": NANO_FOLDER,
        "two_bank": demo_folders(root / "cache").two_bank,
    }
    for name, source in sources.items():
        convert(str(source), str(root / name), dtype="float32")
    return {name: root / name for name in sources}


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network and a cache of its own for the datasets package, in this process."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def stock(verb: str, *arguments: object, folder: Path, home: Path) -> str:
    """Standard output of ``mlx_lm VERB arguments`` in ``folder``, kept off the network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home)}
    done = subprocess.run(
        [sys.executable, "-m", "mlx_lm", verb, *map(str, arguments)],
        env=environment_with(offline),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def loaded(folder: Path) -> Any:
    return mlx_load(str(folder))[:2]


def asked(tokenizer: Any, question: str, **options: Any) -> Any:
    return tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        tokenize=False,
        **options,
    )


def log_likelihoods(model: Any, ids: list[int]) -> np.ndarray:
    """log p of each of ``ids`` but the first, (len − 1,)."""
    logits = model(mx.array([ids[:-1]]))[0].astype(mx.float32)
    logs = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float64)
    return logs[np.arange(len(ids) - 1), ids[1:]]


def continuation(model: Any, tokenizer: Any, question: str, text: str) -> float:
    prompt = asked(tokenizer, question, **NO_THINKING)
    start = len(tokenizer.encode(prompt, add_special_tokens=False))
    ids = tokenizer.encode(prompt + text, add_special_tokens=False)
    return float(log_likelihoods(model, ids)[start - 1 :].sum())


def tasks_in(tmp_path: Path) -> Path:
    """A folder with the tasks; their data lies beside them, by relative names."""
    return Path(shutil.copytree(DATA, tmp_path / "tasks"))


def results(out: Path) -> dict[str, Any]:
    """What ``mlx_lm.evaluate`` wrote to ``out``, by task."""
    (written,) = out.iterdir()
    return json.loads(written.read_text())


def test_likelihood_tasks_on_a_two_bank_build(builds: dict[str, Path], tmp_path: Path):
    out = tmp_path / "out"
    stock(
        "evaluate",
        *("--model", builds["two_bank"], "--output-dir", out),
        *("--chat-template-args", json.dumps(NO_THINKING)),
        *("--tasks", "choice.yaml", "continuation.yaml", "rolling.yaml"),
        folder=tasks_in(tmp_path),
        home=tmp_path / "home",
    )
    found = results(out)
    model, tokenizer = loaded(builds["two_bank"])
    scores = [
        [continuation(model, tokenizer, d["question"], text) for text in d["choices"]]
        for d in DOCUMENTS
    ]
    right = [d["answer"] for d in DOCUMENTS]
    wins = [
        int(np.argmax(pair)) == answer
        for pair, answer in zip(scores, right, strict=True)
    ]
    assert 0 < sum(wins) < len(wins), "documents that tell nothing"
    assert found["choice"]["acc,none"] == pytest.approx(np.mean(wins), rel=1e-9)

    chosen = [pair[answer] for pair, answer in zip(scores, right, strict=True)]
    want = math.exp(-np.mean(chosen))
    assert found["continuation"]["perplexity,none"] == pytest.approx(want, rel=1e-3)

    texts = [d["text"] for d in DOCUMENTS]
    sums = [log_likelihoods(model, tokenizer.encode(text)).sum() for text in texts]
    size = sum(len(text.encode()) for text in texts)
    want = math.exp(-sum(sums) / size)
    assert found["rolling"]["byte_perplexity,none"] == pytest.approx(want, rel=1e-4)


def test_answers_of_the_nano(
    builds: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    offline: None,
):
    """Thinking is left out by the command, the response's markup by the task's filter.

    In this process, and without the index of lm-eval's own tasks, which takes seconds.
    """
    own = partial(lm_eval.evaluator.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.evaluator, "TaskManager", own)
    monkeypatch.chdir(tasks_in(tmp_path))
    out = tmp_path / "out"
    options = [
        "--model",
        builds["nano"],
        "--output-dir",
        out,
        "--tasks",
        "answers.yaml",
    ]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.evaluate", *map(str, options)])
    mlx_lm.evaluate.main()
    found = results(out)
    model, tokenizer = loaded(builds["nano"])
    wins = []
    for document in DOCUMENTS:
        prompt = asked(tokenizer, document["question"])
        text = generate(model, tokenizer, prompt, max_tokens=80)
        answer = re.search(r"<\|open\|>response<\|sep\|>(.*?)<\|close\|>", text)
        wins.append(
            answer is not None and answer[1] == document["choices"][document["answer"]]
        )
    assert 0 < sum(wins) < len(wins), "documents that tell nothing"
    assert found["answers"]["exact_match,response"] == pytest.approx(np.mean(wins))


def own_perplexity(build: Path, rows: np.ndarray, out: Path) -> float:
    """Of rows (rows, length), each of them a document, as ``kimi-k3 evaluate`` gives it."""
    tokenizer = load_tokenizer(build)
    numbers = np.arange(len(rows), dtype=np.int32)[:, None]
    samples = Samples(
        tokens=rows.astype(np.int32),
        labels=np.zeros(rows.shape, np.int16),
        documents=np.broadcast_to(numbers, rows.shape).copy(),
        corpora=("texts",),
        document_hashes=tuple(f"{n:032x}" for n in range(len(rows))),
        tokenizer=tokenizer_fingerprint(tokenizer),
        part="held_out",
    )
    found = Summary.of(evaluate(build, build, out, samples=samples), draws=10)
    assert found.overall.tokens == rows.size - len(rows)
    return found.overall.estimates["build_ppl"].value


@pytest.mark.parametrize("kind", ["nano", "two_bank"])
def test_perplexity_is_ours(
    builds: dict[str, Path], tmp_path: Path, kind: str, offline: None
):
    build = builds[kind]
    options = [
        "--data-path",
        DATA / "texts",
        "--sequence-length",
        32,
        "--num-samples",
        4,
    ]
    printed = stock(
        "perplexity",
        *("--model", build, *options),
        folder=tmp_path,
        home=tmp_path / "home",
    )
    told = re.search(r"Perplexity: ([\d.]+) ±", printed)
    assert told is not None, printed

    model, tokenizer = loaded(build)
    np.random.seed(123)  # the command's own
    rows = load_data(tokenizer, str(DATA / "texts"), 4, 32)
    # What follows an end is judged by the command and not by us.
    assert not (np.array(rows) == tokenizer.eos_token_id).any()
    stock_value, _ = eval_ppl(model, rows)
    assert float(told[1]) == pytest.approx(stock_value, abs=6e-4)
    ours = own_perplexity(build, np.array(rows), tmp_path / "out")
    assert ours == pytest.approx(stock_value, rel=1e-5)
    # Broken twin: one token is another.
    other = np.array(rows)
    other[1, 7] = (other[1, 7] + 1) % 256
    assert ours != pytest.approx(eval_ppl(model, mx.array(other))[0], rel=1e-4)


def test_nothing_of_this_needs_torch():
    from lm_eval.utils import set_torch_seed

    assert "torch" not in sys.modules
    set_torch_seed(123)
    assert "torch" not in sys.modules
