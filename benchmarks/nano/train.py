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
from settings import DOMAINS, Schedule
from torch import Tensor
from torch_model import Nano

SAVE_EVERY, TEST_ROWS = 50, 8


class Windows:
    """Random windows of each domain; what a step sees depends on seed and step only."""

    def __init__(self, data: Path, part: str, length: int):
        self.tokens = [np.load(data / f"{name}.{part}.npy") for name in DOMAINS]
        self.length = length

    def batch(self, seed: tuple[int, ...], rows: int) -> Tensor:
        """(len(DOMAINS)·rows, length + 1) token ids, one domain after another."""
        rng = np.random.default_rng(seed)
        windows = []
        for tokens in self.tokens:
            for start in rng.integers(0, len(tokens) - self.length - 1, rows):
                windows.append(tokens[start : start + self.length + 1])
        return torch.from_numpy(np.stack(windows).astype(np.int64))


def main() -> None:
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    schedule = Schedule(steps=options.steps)
    model = Nano()
    optimizer = Optimizer(model)
    options.out.mkdir(parents=True, exist_ok=True)
    state = options.out / "state.pt"
    step, spent = _resume(state, model, optimizer)
    train = Windows(options.data, "train", schedule.length)
    test = Windows(options.data, "test", schedule.length).batch((9,), TEST_ROWS)
    started = time.perf_counter() - spent
    while step < schedule.steps:
        batch = train.batch((options.seed, step), schedule.rows)
        loss = _step(model, optimizer, batch, schedule, step)
        step += 1
        if step % SAVE_EVERY == 0 or step == schedule.steps:
            spent = time.perf_counter() - started
            bits = bits_per_token(model, test)
            _log(options.out / "log.csv", step, spent, bits)
            _say(model, step, schedule, spent, loss, bits)
            _save(state, model, optimizer, step, spent)
    torch.save(model.state_dict(), options.out / "model.pt")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--data", type=Path, required=True, help="of prepare.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=Schedule.steps)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def _step(
    model: Nano, optimizer: Optimizer, batch: Tensor, schedule: Schedule, step: int
) -> float:
    logits = model(batch[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    model.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    rate = schedule.rate_at(step)
    optimizer.step(rate)
    _move_biases(model, schedule, rate / schedule.rate)
    return loss.item()


@torch.no_grad()
def _move_biases(model: Nano, schedule: Schedule, scale: float) -> None:
    """Only overloaded and starving experts are corrected."""
    low, high = schedule.load_band
    for moe in model.moe_layers():
        ratio = moe.load / moe.load.mean()
        move = (ratio < low).float() - (ratio > high).float()
        moe.e_score_correction_bias += schedule.bias_step * scale * move


@torch.no_grad()
def bits_per_token(model: Nano, batch: Tensor) -> list[float]:
    """Of each domain, over the windows of ``batch``."""
    losses = []
    for rows in batch.chunk(len(DOMAINS)):
        logits = model(rows[:, :-1]).flatten(0, 1)
        losses.append(F.cross_entropy(logits, rows[:, 1:].flatten()).item())
    return [loss / math.log(2) for loss in losses]


def _say(
    model: Nano,
    step: int,
    schedule: Schedule,
    seconds: float,
    loss: float,
    bits: list[float],
) -> None:
    left = seconds / step * (schedule.steps - step)
    loads = [(moe.load / moe.load.sum()).sort().values for moe in model.moe_layers()]
    quarter = sum(load[-len(load) // 4 :].sum().item() for load in loads) / len(loads)
    fewest = min(load[0].item() * len(load) for load in loads)
    most = max(load[-1].item() * len(load) for load in loads)
    found = " ".join(f"{n} {b:.2f}" for n, b in zip(DOMAINS, bits, strict=True))
    print(
        f"{step}/{schedule.steps} {seconds:.0f} s, {left:.0f} s left, "
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
