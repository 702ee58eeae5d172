"""Train one nano: seeded, counted in steps, resumable.

python benchmarks/nano/train.py --data DATA --out RUN --seed 0

Stop it and start it again with the same arguments: it goes on from RUN/state.pt, which
is replaced every fifty steps. RUN/log.csv has bits per token of held-out windows.
Needs torch; set the allocator as README.md says, or it runs several times slower.
"""

import argparse
import csv
import math
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from optimizer import Optimizer
from settings import DOMAINS, STAGES, Schedule, stage_at
from torch import Tensor
from torch_model import Nano

SAVE_EVERY, TEST_ROWS = 50, 8
STEPS = sum(stage.steps for stage in STAGES)
LENGTH = STAGES[0].length

#: Experts of each domain on which choices gather.
FAVOURITES = 2


class Windows:
    """Random windows of each domain; what a step sees depends on seed and step only."""

    def __init__(self, data: Path, part: str, length: int):
        self.tokens = [np.load(data / f"{name}.{part}.npy") for name in DOMAINS]
        self.length = length

    def batch(self, seed: tuple[int, ...], rows: tuple[int, ...]) -> Tensor:
        """(sum of rows, length + 1) token ids, one domain after another."""
        rng = np.random.default_rng(seed)
        windows = []
        for tokens, count in zip(self.tokens, rows, strict=True):
            for start in rng.integers(0, len(tokens) - self.length - 1, count):
                windows.append(tokens[start : start + self.length + 1])
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = Nano()
    optimizer = Optimizer(model)
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / "state.pt"
    step, spent = _resume(state, model, optimizer)
    train = Windows(options.data, "train", LENGTH)
    rows = (TEST_ROWS,) * len(DOMAINS)
    test = Windows(options.data, "test", LENGTH).batch((9,), rows)
    started = time.perf_counter() - spent
    while step < STEPS:
        stage, _ = stage_at(step)
        batch = train.batch((options.seed, step), stage.rows)
        loss = _step(model, optimizer, batch, step)
        step += 1
        if step % SAVE_EVERY == 0 or step == STEPS:
            spent = time.perf_counter() - started
            bits = bits_per_token(model, test)
            _log(options.out / "log.csv", step, spent, bits)
            _say(model, step, spent, loss, bits)
            _save(state, model, optimizer, step, spent)
    torch.save(model.state_dict(), options.out / "model.pt")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, required=True, help="of prepare.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def _step(model: Nano, optimizer: Optimizer, batch: Tensor, step: int) -> float:
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    stage, of_stage = stage_at(step)
    rate = stage.rate_at(of_stage)
    optimizer.step(rate)
    _move_biases(model, stage, rate / STAGES[0].rate)
    return loss.item()


@torch.no_grad()
def _move_biases(model: Nano, stage: Schedule, scale: float) -> None:
    """Correct what is overloaded or starving, or gather choices, as the stage says."""
    low, high = stage.load_band
    for moe in model.moe_layers():
        by_domain = torch.stack([part.mean(0) for part in moe.loads.split(stage.rows)])
        shares = by_domain.mean(0) / by_domain.mean(0).sum()
        ratio = shares * len(shares)
        if stage.concentration is None:
            move = (ratio < low).float() - (ratio > high).float()
        else:
            move = torch.zeros_like(shares)
            if shares.topk(len(shares) // 4).values.sum() < stage.concentration:
                move[by_domain.topk(FAVOURITES).indices.flatten()] = 1
        moe.e_score_correction_bias += stage.bias_step * scale * move


@torch.no_grad()
def bits_per_token(model: Nano, batch: Tensor) -> list[float]:
    """Of each domain, over the windows of ``batch``."""
    logits = model(batch[:, :-1]).transpose(1, 2)
    losses = F.cross_entropy(logits, batch[:, 1:], reduction="none").mean(1)
    means = [rows.mean().item() for rows in losses.chunk(len(DOMAINS))]
    return [mean / math.log(2) for mean in means]


def _say(
    model: Nano, step: int, seconds: float, loss: float, bits: list[float]
) -> None:
    left = seconds / step * (STEPS - step)
    # bits_per_token has just run the same number of windows of each domain.
    loads = [moe.loads.sum(0) / moe.loads.sum() for moe in model.moe_layers()]
    loads = [load.sort().values for load in loads]
    quarter = sum(load[-len(load) // 4 :].sum().item() for load in loads) / len(loads)
    fewest = min(load[0].item() * len(load) for load in loads)
    most = max(load[-1].item() * len(load) for load in loads)
    found = " ".join(f"{n} {b:.2f}" for n, b in zip(DOMAINS, bits, strict=True))
    print(
        f"{step}/{STEPS} {seconds:.0f} s, {left:.0f} s left, "
        f"loss {loss / math.log(2):.2f} bits; held out: {found}; "
        f"top quarter {quarter:.0%} of loads, {fewest:.2f} to {most:.1f} of the mean",
        flush=True,
    )


def _log(path: Path, step: int, seconds: float, bits: list[float]) -> None:
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file)
        if fresh:
            rows.writerow(["step", "seconds", *DOMAINS])
        rows.writerow([step, round(seconds), *(round(b, 4) for b in bits)])


def _save(
    path: Path, model: Nano, optimizer: Optimizer, step: int, seconds: float
) -> None:
    part = path.with_suffix(".part")
    state = {"model": model.state_dict(), "optimizer": optimizer.state()}
    torch.save(state | {"step": step, "seconds": seconds}, part)
    part.replace(path)


def _resume(path: Path, model: Nano, optimizer: Optimizer) -> tuple[int, float]:
    """The step to go on with and the seconds spent so far."""
    if not path.exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load(state["optimizer"])
    return state["step"], state["seconds"]


if __name__ == "__main__":
    main()
