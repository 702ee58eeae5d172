"""Tensor parallel and pipeline on local ranks equal one process."""

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from closeness import assert_close
from mlx_lm.utils import load_model
from small_builds import BITS, COUNTS, HIGH_COUNTS, scrambled
from tiny_k3 import t0_config, write_t1, write_t2

from kimi_k3 import convert
from kimi_k3.config import ModelArgs
from kimi_k3.errors import DistributedError
from kimi_k3.models.distributed import check_divisible

PROGRAM = Path(__file__).parent / "programs" / "ranks.py"

#: Experts wide enough to be cut into whole quantisation groups for four ranks.
WIDE: dict[str, Any] = {"moe_intermediate_size": 256, "routed_expert_hidden_size": 64}

#: Ranks → what they run: how the model is split, and which checkpoint.
JOBS = {
    2: [
        (kind, stored)
        for stored in ("source", "two_bank", "quantised")
        for kind in ("tensor", "pipeline")
    ],
    4: [("tensor", "source"), ("pipeline", "two_bank"), ("tensor", "quantised")],
}
NUMBERED = [
    (ranks, number, *job)
    for ranks, jobs in JOBS.items()
    for number, job in enumerate(jobs)
]


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by name: as released; two banks; these and the rest in few bits."""
    out = tmp_path_factory.mktemp("builds")
    write_t1(out / "source", tokenizer=True, **WIDE)
    write_t2(out / "two_bank", tokenizer=True, **WIDE)
    plan = scrambled(COUNTS, HIGH_COUNTS, bits=BITS | {"mla.q_b_proj": 4})
    convert(out / "source", out / "quantised", plan)
    return out


@pytest.fixture(scope="module")
def launched(
    builds: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Path]:
    """Number of ranks → the folder that they have filled, launched once."""

    @functools.cache
    def launch(ranks: int) -> Path:
        return run_ranks(ranks, builds, tmp_path_factory.mktemp("ranks"))

    return launch


def run_ranks(ranks: int, builds: Path, out: Path) -> Path:
    jobs = JOBS[ranks]
    command = [
        str(Path(sys.executable).with_name("mlx.launch")),
        *("-n", str(ranks), "--backend", "ring", "--"),
        *(sys.executable, str(PROGRAM), str(out)),
        *(f"{kind}:{builds / stored}" for kind, stored in jobs),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )
    last = out / f"{len(jobs) - 1}-0.json"
    assert last.exists(), done.stdout + done.stderr
    return out


@functools.cache
def one_process(folder: Path) -> mx.array:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model(mx.array([[(7 * i + 3) % 500 for i in range(23)]]))


@pytest.mark.parametrize(("ranks", "number", "kind", "stored"), NUMBERED)
def test_ranks_equal_one_process(
    launched: Callable[[int], Path],
    builds: Path,
    ranks: int,
    number: int,
    kind: str,
    stored: str,
) -> None:
    out = launched(ranks)
    classes = [json.loads(f.read_text()) for f in out.glob(f"{number}-*.json")]
    assert classes == ["kimi_k3.models.kimi_k3"] * ranks
    got = cast(Any, mx.load(str(out / f"{number}.safetensors")))["logits"]
    assert_close(got, one_process(builds / stored), rel=1e-4, where=f"{stored}, {kind}")


def test_ranks_that_do_not_divide_are_refused_before_anything_changes() -> None:
    args = ModelArgs.from_dict(t0_config()).text_config
    with pytest.raises(
        DistributedError,
        match=r"linear_attn_config.num_heads is 4, which 3 ranks do not divide; "
        r"this model splits over 1, 2, 4 ranks",
    ):
        check_divisible(args, 3)
