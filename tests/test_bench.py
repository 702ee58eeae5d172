"""``kimi-k3 bench``: what it times, counts and tells, on the nano model."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from kimi_k3.cli import main
from kimi_k3.errors import KimiK3Error
from kimi_k3.loading import load
from kimi_k3.machine import bench as module
from kimi_k3.machine.bench import bench, bytes_per_token
from kimi_k3.nano.cache import DemoFolders, demo_folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> DemoFolders:
    return demo_folders(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def memory_of_a_gigabyte_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_bandwidth", lambda: 1e9)


def test_last_line_is_the_report(
    folders: DemoFolders, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompt", "9", "--tokens", "5", "--runs", "3"]
    assert main(["bench", str(folders.two_bank), *sizes]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert (result["prompt_tokens"], result["decoded_tokens"]) == (9, 5)
    rates = sorted(run["decode"] for run in result["runs"])
    assert len(rates) == 3
    assert result["decode"] == rates[1]
    assert result["peak_memory"] == max(r["peak_memory"] for r in result["runs"]) > 0
    needed = result["bytes_per_token"]
    assert result["share_of_bandwidth"] == pytest.approx(needed * rates[1] / 1e9)
    assert "tokens/s" in captured.out
    assert "run 3 of 3" in captured.err


def test_an_answer_does_not_end_early(
    folders: DemoFolders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that the model may give ends an answer, yet all are timed."""

    def with_many_ends(path: Any) -> tuple[Any, Any]:
        model, tokenizer = load(path)
        tokenizer.eos_token_ids = range(model.args.text_config.vocab_size)
        return model, tokenizer

    monkeypatch.setattr(module, "load", with_many_ends)
    report = bench(folders.plain, prompt_tokens=3, decoded_tokens=4, runs=1)
    assert report.decode > 0


def test_a_generation_that_ends_early_is_no_figure(folders: DemoFolders) -> None:
    model, tokenizer = load(folders.plain)
    tokenizer.eos_token_ids = range(model.args.text_config.vocab_size)
    with pytest.raises(KimiK3Error, match="gave 1 of 4 tokens"):
        module.generate_once(model, tokenizer, 3, 4)


def test_bytes_of_a_token(folders: DemoFolders) -> None:
    """Against a count by hand: all, less the experts and embedded rows not read."""
    model, _ = load(folders.plain)
    text = model.args.text_config
    parameters: dict[str, mx.array] = dict(tree_flatten(model.parameters()))  # type: ignore
    experts = sum(a.nbytes for n, a in parameters.items() if "switch_mlp" in n)
    embedding = sum(a.nbytes for n, a in parameters.items() if "embed_tokens" in n)
    everything = sum(a.nbytes for a in parameters.values())
    one_in = text.num_experts // text.num_experts_per_token
    want = everything - experts + experts // one_in
    want += embedding // text.vocab_size - embedding
    assert experts > 0
    assert bytes_per_token(model) == want


def test_bytes_of_two_banks_lie_between_those_of_each(folders: DemoFolders) -> None:
    model, _ = load(folders.two_bank)
    text = model.args.text_config
    counts = [text.experts_in_layer(i) for i in range(text.num_hidden_layers)]
    assert len({count for count in counts if count}) > 1
    least = most = 0
    for layer, count in zip(model.layers, counts, strict=True):
        if not count:
            continue
        sizes = []
        for bank, size in layer.mlp.switch_mlp.banks():
            flat: Any = tree_flatten(bank.parameters())
            sizes.append(sum(a.nbytes for _, a in flat) // size)
        least += min(sizes) * text.num_experts_per_token
        most += max(sizes) * text.num_experts_per_token
    parameters: Any = tree_flatten(model.parameters())
    rest = sum(a.nbytes for n, a in parameters if "switch_mlp" not in n)
    rest -= sum(a.nbytes for n, a in parameters if "embed_tokens" in n)
    assert rest + least < bytes_per_token(model) < rest + most + text.hidden_size * 2


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"prompt_tokens": 0}, "--prompt is 0; give 1 or more"),
        ({"decoded_tokens": 1}, "--tokens is 1; give 2 or more"),
        ({"runs": 0}, "--runs is 0; give 1 or more"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_sizes_that_give_nothing_to_time(
    sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(KimiK3Error, match=message):
        bench(tmp_path, **sizes)
