"""What a plan costs: bytes of the build, and bytes that a decoded token reads.

Exact, from the config alone; a build's shards hold these bytes besides their headers.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..checkpoint.source_layout import source_tensors
from ..checkpoint.stored_format import StoredFormat
from ..config import ModelArgs
from ..errors import PlanError
from ..models import Model
from .expert_plan import HIGH, ExpertPlan
from .matrix_classes import (
    CLASS_BITS,
    affine_format,
    class_matrices,
    refuse_unknown_classes,
)

#: The class of which a token reads one row, if the head is not tied to it.
EMBEDDING = "embed_tokens"


@dataclass(frozen=True)
class SourceSizes:
    """Bytes of everything that a plan decides about, of one source config.

    Attributes:
        args: of the source.
        classes: class of matrices → bits → bytes of all its matrices. Bits that change
            nothing, because no group size divides the columns, are not listed.
        rest: bytes that no plan changes: norms, convolutions, vision and the like.
        vision: the part of ``rest`` that text does not read.
    """

    args: ModelArgs
    classes: Mapping[str, Mapping[int, int]]
    rest: int
    vision: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SourceSizes":
        """The sizes for ``config``, a config of the release's format."""
        args = ModelArgs.from_dict(dict(config))
        text = args.text_config
        classes = _class_bytes(Model(args))
        sizes = cls(args, classes, 0, 0)
        experts = sum(
            text.experts_in_layer(layer) for layer in range(text.num_hidden_layers)
        )
        decided = experts * sizes.expert_bytes(HIGH)
        decided += sum(found[16] for found in classes.values())
        stored = vision = padding = 0
        for tensor in source_tensors(args):
            stored += tensor.nbytes
            if not tensor.name.startswith("language_model."):
                vision += tensor.nbytes
            if tensor.name.endswith(".A_log"):
                heads = text.linear_attn_config.num_heads
                padding += tensor.nbytes - 4 * heads
        return cls(args, classes, stored - padding - decided, vision)

    def expert_bytes(self, stored: StoredFormat) -> int:
        """One kept expert in a format, with its router row and correction bias."""
        text = self.args.text_config
        outer, inner = text.expert_hidden_size, text.moe_intermediate_size
        matrices = 2 * matrix_bytes(inner, outer, stored)
        matrices += matrix_bytes(outer, inner, stored)
        return matrices + self.router_bytes

    @cached_property
    def router_bytes(self) -> int:
        """Router row (bfloat16) and correction bias (float32) of one expert."""
        return 2 * self.args.text_config.hidden_size + 4

    def plan_bytes(self, plan: ExpertPlan) -> int:
        """All tensors of the build that ``plan`` makes."""
        high, low = self._expert_pair(plan)
        experts = sum(
            len(layer.high) * high + len(layer.low) * low
            for layer in plan.layers.values()
        )
        return experts + self.rest + sum(self.class_bytes(plan).values())

    def bytes_per_token(
        self, plan: ExpertPlan, frequency: Mapping[int, np.ndarray] | None = None
    ) -> int:
        """Bytes of weights that one decoded token of text reads, each once.

        Args:
            frequency: layer → (E,), how often each *source* expert is chosen. Choices
                of dropped experts go to the kept ones in proportion. None: kept experts
                are chosen alike.
        """
        text = self.args.text_config
        classes = self.class_bytes(plan)
        if not text.tie_word_embeddings and EMBEDDING in classes:
            classes[EMBEDDING] = round(classes[EMBEDDING] / text.vocab_size)
        total = float(sum(classes.values()) + self.rest - self.vision)
        for layer in plan.layers.values():
            total += self.router_bytes * len(layer.order)
        return round(total + sum(self.routed_bytes_per_token(plan, frequency)))

    def routed_bytes_per_token(
        self, plan: ExpertPlan, frequency: Mapping[int, np.ndarray] | None = None
    ) -> tuple[float, float]:
        """The part of :meth:`bytes_per_token` that is matrices of routed experts.

        Those of the high bank, then those of the low. A sum of expected choices: where a
        bank has fewer experts than a token picks, frequencies may count them as chosen
        more often than once, which no router does.
        """
        sizes = [size - self.router_bytes for size in self._expert_pair(plan)]
        picked = np.zeros(2)
        for number, layer in plan.layers.items():
            share = len(layer.high) / len(layer.order)
            if frequency is not None:
                chosen = np.asarray(frequency[number], np.float64)
                kept = chosen[list(layer.order)].sum()
                if kept > 0:
                    share = chosen[list(layer.high)].sum() / kept
            picked += share, 1 - share
        high, low = self.args.text_config.num_experts_per_token * picked * sizes
        return float(high), float(low)

    def class_bytes(self, plan: ExpertPlan) -> dict[str, int]:
        """Class → bytes at the plan's bits; raises PlanError for an unknown class."""
        refuse_unknown_classes(plan.bits, self.classes)
        return {
            name: found.get(plan.bits.get(name, 16), found[16])
            for name, found in self.classes.items()
        }

    def _expert_pair(self, plan: ExpertPlan) -> tuple[int, int]:
        """Bytes of one expert of each bank; 0 for a low bank that no layer has."""
        low = any(layer.low for layer in plan.layers.values())
        return self.expert_bytes(HIGH), self.expert_bytes(plan.low_format) if low else 0


def matrix_bytes(rows: int, columns: int, stored: StoredFormat | None) -> int:
    """A matrix with its scales, and biases if affine; None is bfloat16.

    Raises PlanError if the format's groups do not divide the columns.
    """
    if stored is None:
        return 2 * rows * columns
    if columns % stored.group_size:
        raise PlanError(
            f"a matrix of {columns} columns cannot be stored in {stored.bits} bits, in "
            f"groups of {stored.group_size}. Keep its experts as they are, or drop them."
        )
    groups = rows * (columns // stored.group_size)
    codes = rows * columns * stored.bits // 8
    return codes + groups * (4 if stored.mode == "affine" else 1)


def _class_bytes(model: Model) -> dict[str, dict[int, int]]:
    found: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for name, _, module in class_matrices(model):
        *heads, rows, columns = module["weight"].shape
        for bits in CLASS_BITS:
            stored = affine_format(bits, columns)
            nbytes = math.prod(heads) * matrix_bytes(rows, columns, stored)
            found[name][bits] += nbytes
    return {
        name: {b: n for b, n in sizes.items() if b == 16 or n != sizes[16]}
        for name, sizes in sorted(found.items())
    }
