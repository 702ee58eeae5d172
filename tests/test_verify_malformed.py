"""``kimi-k3 verify``: a malformed record is a fault that is told, never a traceback."""

import json
from pathlib import Path
from typing import Any

import pytest
from damage import copy_folder
from small_builds import scrambled, write_source

from kimi_k3.cli import main
from kimi_k3.conversion.convert import convert
from kimi_k3.conversion.provenance import RECORD

BIG = 10**30
PLAN = scrambled(high=(5, 1, 16, 6))
SHARD = "model-00003-of-000007.safetensors"
LAYERS = ("plan", "layers")

#: What is put where in the record.
MALFORMED: list[tuple[tuple[Any, ...], Any]] = [
    ((), None),
    ((), []),
    ((), "a conversion"),
    (("version",), True),
    (("tool",), {}),
    (("tool",), {"mlx": 1}),
    (("plan",), []),
    (("plan", "version"), True),
    (("plan", "experts"), 0),
    (("plan", "experts"), BIG),
    (("plan", "experts"), 17),
    (("plan", "top_k"), 0),
    (("plan", "top_k"), 3),
    (("plan", "groups"), 0),
    (("plan", "groups"), BIG),
    (("plan", "groups"), 2),
    (("plan", "low_bits"), 4),
    (("plan", "low_bits"), 1e400),
    (("plan", "bits"), {"kda.q_proj": 8}),
    (("plan", "bits"), {"lm_head": 7}),
    (("plan", "source"), []),
    (("plan", "source"), {"fingerprint": "0"}),
    (("plan", "about"), {"gap": 1e400}),
    (LAYERS, {}),
    (LAYERS, []),
    ((*LAYERS, "03"), {"high": [0, 1, 2, 3], "low": []}),
    ((*LAYERS, "٣"), {"high": [0, 1, 2, 3], "low": []}),
    ((*LAYERS, str(BIG)), {"high": [0, 1, 2, 3], "low": []}),
    ((*LAYERS, "3", "low"), None),
    ((*LAYERS, "3", "high", 0), -1),
    ((*LAYERS, "3", "high", 0), BIG),
    (("kept",), {}),
    (("kept",), []),
    (("kept", "3"), []),
    (("kept", "x"), [1]),
    (("moments",), 5),
    (("moments",), {}),
    (("moments",), "f" * 63),
    (("source",), None),
    (("source", "fingerprint"), 5),
    (("source", "shards"), []),
    (("shards",), {}),
    (("shards", SHARD), 5),
    (("shards", SHARD, "size"), BIG),
    (("shards", SHARD, "sha256"), "0" * 64),
    (("shards", SHARD, "sha256"), True),
    (("shards", "../../x"), {"size": 1, "header_sha256": "0" * 64}),
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    at = tmp_path_factory.mktemp("malformed")
    return convert(write_source(at / "source"), at / "build", PLAN)


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_a_malformed_record(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int
) -> None:
    place, value = MALFORMED[number]
    folder = copy_folder(whole, tmp_path / "build")
    config = json.loads((folder / "config.json").read_text())
    inner: Any = config
    *outer, last = (RECORD, *place)
    for key in outer:
        inner = inner[key]
    inner[last] = value
    (folder / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(folder), "--json"]) == 1, place
    report = json.loads(capsys.readouterr().out)
    faults = [found["what"] for found in report["findings"] if not found["note"]]
    assert faults, place
    assert all(len(fault) < 1000 for fault in faults)


def test_the_build_as_it_is(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(whole), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
