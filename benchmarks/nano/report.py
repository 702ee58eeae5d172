"""Judge the three nanos on held-out text, and put the figures into README.md.

python benchmarks/nano/report.py            all of it: benchmarks/results/nano.json
python benchmarks/nano/report.py --page     only rewrite README.md from the results

Text is never one the nanos were trained on. Bits per byte are set beside bz2 on the
same documents; usage is that of a calibration on mix.toml.
"""

import argparse
import bz2
import json
import math
import platform
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

import kimi_k3
from kimi_k3.build.calibrate import calibrate
from kimi_k3.build.saliency_report import saliency_report
from kimi_k3.build.samples import make_samples
from kimi_k3.nano import NANO_FOLDER

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "results" / "nano.json"
NANOS = {
    "seed 0 (shipped)": NANO_FOLDER,
    "seed 1": HERE / "seed1",
    "seed 2": HERE / "seed2",
}
DOMAINS = ("python", "c", "english", "chinese", "chat")

#: Tokens a window and windows a domain for bits per byte.
WINDOW, WINDOWS = 512, 40
SAMPLE_TOKENS = 90

#: Beginnings that the nanos go on from, at temperature 0.7.
BEGINNINGS = {
    "python": "def read_lines(path):\n",
    "c": "static int ",
    "english": "The server ",
    "chinese": "明月",
}
QUESTIONS = (
    "Hello, who are you?",
    "What is 7 + 5?",
    "二加三等于几？",
    "Write a Python function that adds two numbers.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--page", action="store_true")
    if not parser.parse_args().page:
        RESULT.write_text(json.dumps(_measure(), ensure_ascii=False, indent=1) + "\n")
    result = json.loads(RESULT.read_text("utf-8"))
    page = HERE / "README.md"
    page.write_text(filled(page.read_text("utf-8"), result), "utf-8")


def _measure() -> dict[str, Any]:
    packages = ("mlx", "mlx-lm", "numpy", "kimi-k3-mlx")
    return {
        "command": "python benchmarks/nano/report.py",
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "versions": {name: version(name) for name in packages},
        "windows": [WINDOWS, WINDOW],
        "bz2": {name: _bz2_bits(name) for name in DOMAINS},
        "nanos": {name: _judge(name, folder) for name, folder in NANOS.items()},
    }


def _judge(name: str, folder: Path) -> dict[str, Any]:
    print(name, file=sys.stderr, flush=True)
    model, tokenizer = kimi_k3.load(folder)
    bits = {domain: _bits_per_byte(model, tokenizer, domain) for domain in DOMAINS}
    samples = _samples(model, tokenizer)
    text = make_samples(HERE / "mix.toml", folder)
    with tempfile.TemporaryDirectory() as out:
        table = calibrate(folder, text, out)
    figures = saliency_report(table)
    return {
        "bits_per_byte": bits,
        "top_quarter": [layer.top_quarter for layer in figures.layers],
        "busiest": [layer.busiest for layer in figures.layers],
        "corpora": list(figures.corpora),
        "overlap": figures.overlap,
        "chance": figures.chance,
        "samples": samples,
    }


def _documents(domain: str) -> Iterator[dict[str, Any]]:
    with (HERE / "samples" / f"{domain}.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def _tokens(tokenizer: Any, domain: str) -> list[int]:
    """Held-out documents of a domain, each ended by [EOS]."""
    end = tokenizer.convert_tokens_to_ids("[EOS]")
    found: list[int] = []
    for document in _documents(domain):
        if "text" in document:
            found += tokenizer.encode(document["text"])
        else:
            found += tokenizer.apply_chat_template(
                document["messages"], tools=document.get("tools"), tokenize=True
            )
        found.append(end)
        if len(found) > WINDOW * WINDOWS:
            break
    return found


def _bits_per_byte(model: Any, tokenizer: Any, domain: str) -> float:
    tokens = _tokens(tokenizer, domain)
    count = min(WINDOWS, (len(tokens) - 1) // WINDOW)
    bits, size = 0.0, 0
    for start in range(0, count * WINDOW, WINDOW):
        row = tokens[start : start + WINDOW + 1]
        logits = model(mx.array([row[:-1]])).astype(mx.float32)
        loss = nn.losses.cross_entropy(logits[0], mx.array(row[1:]), reduction="sum")
        bits += loss.item() / math.log(2)
        size += len(tokenizer.decode(row[1:]).encode())
    return bits / size


def _bz2_bits(domain: str) -> float:
    """Bits a byte that bz2 needs for all held-out documents of a domain at once."""
    texts = []
    for document in _documents(domain):
        whole = document.get("text") or json.dumps(document, ensure_ascii=False)
        texts.append(whole)
    data = "\n".join(texts).encode()
    return 8 * len(bz2.compress(data)) / len(data)


def _samples(model: Any, tokenizer: Any) -> dict[str, str]:
    from mlx_lm import generate
    from mlx_lm.sample_utils import make_sampler

    found = {}
    for domain, beginning in BEGINNINGS.items():
        mx.random.seed(1)
        sampler = make_sampler(temp=0.7, top_p=0.95)
        text = generate(
            model, tokenizer, beginning, max_tokens=SAMPLE_TOKENS, sampler=sampler
        )
        found[domain] = beginning + text
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        answer = generate(model, tokenizer, prompt, max_tokens=SAMPLE_TOKENS)
        found[question] = answer
    return found


def filled(page: str, result: dict[str, Any]) -> str:
    """``page`` with the tables between its markers made anew."""
    tables = {
        "bits": _bits_table(result),
        "concentration": _concentration_table(result),
        "overlap": _overlap_table(result),
        "samples": _sample_blocks(result),
    }
    for name, table in tables.items():
        first, last = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = page.partition(first)
        _, _, after = rest.partition(last)
        page = f"{before}{first}\n{table}\n{last}{after}"
    return page


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _bits_table(result: dict[str, Any]) -> str:
    rows = [
        [name, *(f"{nano['bits_per_byte'][d]:.2f}" for d in DOMAINS)]
        for name, nano in result["nanos"].items()
    ]
    rows.append(["bz2", *(f"{result['bz2'][d]:.2f}" for d in DOMAINS)])
    return _table(["bits per byte", *DOMAINS], rows)


def _concentration_table(result: dict[str, Any]) -> str:
    rows = []
    for name, nano in result["nanos"].items():
        top, busiest = nano["top_quarter"], nano["busiest"]
        rows.append(
            [
                name,
                f"{np.mean(top):.0%}",
                f"{min(top):.0%} to {max(top):.0%}",
                f"{max(busiest):.1f}",
            ]
        )
    head = ["", "top quarter, mean", "by layer", "busiest expert : mean"]
    return _table(head, rows)


def _overlap_table(result: dict[str, Any]) -> str:
    """Pairs of domains, one row a nano; the last row is chance."""
    nanos = result["nanos"]
    corpora = next(iter(nanos.values()))["corpora"]
    pairs = [(i, j) for i in range(len(corpora)) for j in range(i)]
    rows = [
        [name, *(f"{nano['overlap'][i][j]:.0%}" for i, j in pairs)]
        for name, nano in nanos.items()
    ]
    chance = next(iter(nanos.values()))["chance"]
    rows.append(["chance", *(f"{chance[i][j]:.0%}" for i, j in pairs)])
    return _table(["", *(f"{corpora[j]}, {corpora[i]}" for i, j in pairs)], rows)


def _sample_blocks(result: dict[str, Any]) -> str:
    first = next(iter(result["nanos"].values()))
    blocks = []
    for name, text in first["samples"].items():
        blocks.append(f"{name}:\n\n```text\n{text.strip()}\n```")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    main()
