"""``kimi-k3 demo``: the cache of its checkpoints, its verdict, and one whole run."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

import kimi_k3
from kimi_k3.build.layer_stream import LayerStream
from kimi_k3.errors import KimiK3Error
from kimi_k3.models import kimi_k3 as our_module
from kimi_k3.nano import NANO_FOLDER
from kimi_k3.nano.cache import (
    DEMO_PLAN,
    DemoFolders,
    default_cache_dir,
    demo_folders,
)
from kimi_k3.nano.demo import (
    LEAST_TOKENS,
    MAX_TOKENS,
    Generation,
    Loaded,
    find_problems,
    parse_generation,
    printable,
    run_demo,
)
from kimi_k3.planning.expert_plan import ExpertPlan
from kimi_k3.planning.plan_sizes import SourceSizes

OURS = Loaded(our_module.__file__, None)
THEIRS = Loaded("/site-packages/mlx_lm/models/kimi_k3.py", None)
REFUSED = Loaded(None, "ValueError: Received 9 parameters not in model: x.bank_hi.y")
RUN = Generation(("mlx_lm.generate", "--model", "nano"), "text", 32, None)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoFolders]:
    cache = tmp_path_factory.mktemp("cache")
    return cache, demo_folders(cache)


def test_folders_are_made_once_and_whole(cached):
    cache, folders = cached
    assert folders.made
    assert folders.plain == NANO_FOLDER
    for folder in (folders.plain, folders.two_bank):
        names = {path.name for path in folder.iterdir()}
        assert {"config.json", "tiktoken.model", "tokenizer_config.json"} <= names
    size = sum(path.stat().st_size for path in folders.plain.iterdir())
    assert size < 4e6
    assert [path.name for path in cache.iterdir()] == ["nano-demo"]
    assert demo_folders(cache) == replace(folders, made=False)


def test_tokenizer_and_config_of_nano_agree(cached):
    config = json.loads((cached[1].plain / "config.json").read_text())
    tokenizer = json.loads((cached[1].plain / "tokenizer_config.json").read_text())
    named = {int(i): t["content"] for i, t in tokenizer["added_tokens_decoder"].items()}
    ranks = len((cached[1].plain / "tiktoken.model").read_text().splitlines())
    assert config["text_config"]["vocab_size"] == ranks + 256
    assert named[config["eos_token_id"]] == "<|end_of_msg|>"
    assert named[config["media_placeholder_token_id"]] == "<|media_pad|>"


def test_the_plan_is_one_for_the_shipped_nano(cached):
    """Other counts in each layer, two banks, as large as its name says."""
    plan = ExpertPlan.load(DEMO_PLAN)
    source = json.loads((NANO_FOLDER / "config.json").read_text())
    sizes = SourceSizes.of(source)
    plan.check_fits(sizes.args.text_config)
    assert plan.source == {"fingerprint": LayerStream(NANO_FOLDER).fingerprint}
    assert 2.1e6 < sizes.plan_bytes(plan) <= plan.about["memory"] == 2.2e6
    assert len({len(layer.order) for layer in plan.layers.values()}) > 1
    assert all(plan.split(layer) for layer in plan.layers)
    assert kimi_k3.verify(cached[1].two_bank, NANO_FOLDER).passed


@pytest.mark.parametrize(
    "fault", ["missing shard", "flipped byte", "stale", "no stamp"]
)
def test_damaged_or_stale_folders_are_made_again(cached, fault):
    cache, folders = cached
    shard = folders.two_bank / "model-00002-of-000009.safetensors"
    stamp = cache / "nano-demo" / "stamp.json"
    original = shard.read_bytes()
    if fault == "missing shard":
        shard.unlink()
    elif fault == "flipped byte":
        shard.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    elif fault == "stale":
        stamp.write_text(stamp.read_text().replace('"recipe": "', '"recipe": "0'))
    else:
        stamp.unlink()
    assert demo_folders(cache).made
    assert shard.read_bytes() == original
    assert not demo_folders(cache).made


def test_a_folder_of_that_name_with_other_files_is_left_alone(tmp_path):
    (tmp_path / "nano-demo").mkdir()
    thesis = tmp_path / "nano-demo" / "thesis.txt"
    thesis.write_text("mine")
    with pytest.raises(KimiK3Error, match="holds files that the demo did not make"):
        demo_folders(tmp_path)
    assert thesis.read_text() == "mine"


def test_what_an_earlier_demo_kept_is_replaced(tmp_path):
    (tmp_path / "nano-demo" / "nano").mkdir(parents=True)
    (tmp_path / "nano-demo" / "nano" / "config.json").write_text("{}")
    assert demo_folders(tmp_path).made
    assert not (tmp_path / "nano-demo" / "nano").exists()


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(KimiK3Error, match=r"file/cache cannot hold .* --cache-dir"):
        demo_folders(tmp_path / "file" / "cache")


def test_default_cache_dir():
    assert default_cache_dir({"XDG_CACHE_HOME": "/x"}) == Path("/x/kimi-k3-mlx")
    assert default_cache_dir({}) == Path.home() / ".cache" / "kimi-k3-mlx"


def test_no_problem_when_all_is_as_promised():
    assert find_problems([RUN, RUN], [OURS, OURS], [THEIRS, REFUSED]) == []


@pytest.mark.parametrize(
    ("runs", "loaded", "control", "message"),
    [
        ([RUN, replace(RUN, tokens=LEAST_TOKENS - 1)], None, None, "gave 19 tokens"),
        ([replace(RUN, complaint="exit code 1"), RUN], None, None, "failed: exit code"),
        (None, [OURS, THEIRS], None, "instead of this package's class"),
        (None, [REFUSED, OURS], None, "instead of this package's class"),
        (None, None, [OURS, REFUSED], "should load the plain folder"),
        (None, None, [REFUSED, REFUSED], "should load the plain folder"),
        (None, None, [THEIRS, THEIRS], "should refuse the two-bank folder"),
        (None, None, [THEIRS, Loaded(None, "OSError: x")], "name a bank_hi tensor"),
    ],
)
def test_each_problem_is_named(runs, loaded, control, message):
    problems = find_problems(
        runs or [RUN, RUN], loaded or [OURS, OURS], control or [THEIRS, REFUSED]
    )
    assert len(problems) == 1
    assert message in problems[0]


def test_parse_generation():
    output = (
        "==========\nsome\ntext\n==========\nPrompt: 9 tokens, 80.1 tokens-per-sec\n"
        "Generation: 32 tokens, 71.2 tokens-per-sec\nPeak memory: 0.012 GB\n"
    )
    assert parse_generation(output) == ("some\ntext", 32)
    assert parse_generation("No text generated for this prompt\n") == ("", 0)
    assert printable("a\x1b[2J\nb\u8bed") == "a·[2J·b\u8bed"


@pytest.mark.slow
def test_whole_demo(cached):
    """Generates with the stock command; the user's own off switch does not matter."""
    lines: list[str] = []
    start = time.perf_counter()
    report = run_demo(
        cached[0],
        environment=os.environ | {"KIMI_K3_MLX": "off"},
        progress=lines.append,
    )
    text = "\n".join(lines)
    assert report.problems == (), text
    assert report.seconds <= time.perf_counter() - start < 60
    plain, two_bank = report.generations
    assert "def add(a, b):\n    return a + b" in plain.text
    assert LEAST_TOKENS <= plain.tokens < MAX_TOKENS  # it ends by itself
    assert "def " in two_bank.text
    assert [found.file for found in report.loaded] == [our_module.__file__] * 2
    assert "mlx_lm" in (report.control[0].file or "")
    assert "not in model" in (report.control[1].error or "")
    assert "$ mlx_lm.generate --model" in text
    # The same verdict fails when mlx-lm's own class had done the work.
    assert find_problems(report.generations, report.control, report.control)
