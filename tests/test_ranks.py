"""Tensor parallel and pipeline on two local ranks equal one process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from closeness import assert_close
from mlx_lm.utils import load_model
from tiny_k3 import t0_config, write_t1, write_t2

from kimi_k3.config import ModelArgs
from kimi_k3.errors import DistributedError
from kimi_k3.models.distributed import check_divisible

PROGRAM = Path(__file__).parent / "programs" / "ranks.py"

#: Experts wide enough to be cut into whole quantisation groups for two ranks.
WIDE: dict[str, Any] = {"moe_intermediate_size": 128, "routed_expert_hidden_size": 64}

JOBS = [
    (kind, stored)
    for stored in ("source", "two_bank")
    for kind in ("tensor", "pipeline")
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that two launched ranks have filled, checkpoints beside it."""
    out = tmp_path_factory.mktemp("ranks")
    write_t1(out / "source", tokenizer=True, **WIDE)
    write_t2(out / "two_bank", tokenizer=True, **WIDE)
    command = [
        str(Path(sys.executable).with_name("mlx.launch")),
        *("-n", "2", "--backend", "ring", "--"),
        *(sys.executable, str(PROGRAM), str(out)),
        *(f"{kind}:{out / stored}" for kind, stored in JOBS),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, stdin=subprocess.DEVNULL
    )
    last = out / f"{len(JOBS) - 1}-0.json"
    assert last.exists(), done.stdout + done.stderr
    return out


def one_process(folder: Path) -> mx.array:
    model, _ = load_model(folder)
    model.set_dtype(mx.float32)
    return model(mx.array([[(7 * i + 3) % 500 for i in range(23)]]))


@pytest.mark.parametrize(
    ("number", "kind", "stored"), [(i, *job) for i, job in enumerate(JOBS)]
)
def test_two_ranks_equal_one_process(
    ranks: Path, number: int, kind: str, stored: str
) -> None:
    modules = [json.loads((ranks / f"{number}-{r}.json").read_text()) for r in (0, 1)]
    assert modules == ["kimi_k3.models.kimi_k3"] * 2
    got = cast(Any, mx.load(str(ranks / f"{number}.safetensors")))["logits"]
    assert_close(got, one_process(ranks / stored), rel=1e-4, where=f"{stored}, {kind}")


def test_ranks_that_do_not_divide_are_refused_before_anything_changes() -> None:
    args = ModelArgs.from_dict(t0_config()).text_config
    with pytest.raises(
        DistributedError,
        match=r"linear_attn_config.num_heads is 4, which 3 ranks do not divide; "
        r"this model splits over 1, 2, 4 ranks",
    ):
        check_divisible(args, 3)
