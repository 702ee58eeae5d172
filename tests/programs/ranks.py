"""Run by mlx.launch: one rank of models that mlx-lm's ``sharded_load`` splits.

    ranks.py OUT tensor:FOLDER pipeline:FOLDER …

For each job, rank 0 writes the logits of a nine-token prefill and fourteen single steps
to ``OUT/JOB.safetensors`` (jobs count from 0), and each rank the module that its class
came from to ``OUT/JOB-RANK.json``.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import sharded_load

warnings.simplefilter("ignore")


def run(folder: str, kind: str, group: mx.distributed.Group) -> tuple[mx.array, str]:
    groups = (None, group) if kind == "tensor" else (group, None)
    model: Any = sharded_load(folder, *groups)[0]
    model.set_dtype(mx.float32)

    tokens = mx.array([[(7 * i + 3) % 500 for i in range(23)]])
    cache = model.make_cache()
    logits = [model(tokens[:, :9], cache=cache)]
    for i in range(9, 23):
        logits.append(model(tokens[:, i : i + 1], cache=cache))
        mx.eval(logits[-1])
    return mx.concatenate(logits, axis=1), type(model).__module__


out, group = Path(sys.argv[1]), mx.distributed.init()
for number, job in enumerate(sys.argv[2:]):
    kind, _, folder = job.partition(":")
    logits, module = run(folder, kind, group)
    mx.eval(logits)
    (out / f"{number}-{group.rank()}.json").write_text(json.dumps(module))
    if group.rank() == 0:
        mx.save_safetensors(str(out / f"{number}.safetensors"), {"logits": logits})
