"""Muon for the hidden matrices, AdamW for the rest, with one learning rate."""

import torch
from torch import Tensor, nn

_ADAMW = ("embed_tokens", "lm_head", "conv1d", "mlp.gate.", "b_proj")
_MOMENTUM, _DECAY = 0.95, 0.1

#: Coefficients of the quintic iteration that pushes singular values towards one.
_QUINTIC = (3.4445, -4.7750, 2.0315)


class Optimizer:
    """``step(rate)`` after a backward pass; ``state``/``load`` for resuming."""

    def __init__(self, model: nn.Module):
        adamw = []
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or any(part in name for part in _ADAMW):
                adamw.append(parameter)
            else:
                self.groups.setdefault(tuple(parameter.shape), []).append(parameter)
        self.adamw = torch.optim.AdamW(
            adamw, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.momenta = {
            shape: torch.zeros(len(group), *shape)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        for shape, parameters in self.groups.items():
            gradient = torch.stack([p.grad for p in parameters])
            momentum = self.momenta[shape].mul_(_MOMENTUM).add_(gradient)
            update = _orthogonal((gradient + _MOMENTUM * momentum).flatten(0, -3))
            update = update.reshape(len(parameters), *shape)
            update = update * (0.2 * max(shape[-2:]) ** 0.5)
            for parameter, change in zip(parameters, update, strict=True):
                parameter.mul_(1 - rate * _DECAY).sub_(change, alpha=rate)

    def state(self) -> dict:
        return {"adamw": self.adamw.state_dict(), "momenta": self.momenta}

    def load(self, state: dict) -> None:
        self.adamw.load_state_dict(state["adamw"])
        self.momenta = state["momenta"]


def _orthogonal(x: Tensor) -> Tensor:
    """The nearest matrix of equal singular values, about; (N, rows, columns)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _QUINTIC
    for _ in range(5):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
