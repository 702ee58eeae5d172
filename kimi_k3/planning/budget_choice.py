"""What a budget may choose from, in bytes and damage, and the solver's problem of it."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..checkpoint.stored_format import StoredFormat
from ..errors import PlanError
from .budget_problem import LARGE, OFF, SMALL, Option, Problem
from .budget_tokens import TokenForm
from .damage import Damage
from .expert_plan import HIGH, LOW_GROUP, ExpertPlan, LayerPlan
from .matrix_classes import CLASS_BITS, refuse_unknown_classes
from .plan_sizes import EMBEDDING, SourceSizes


@dataclass(frozen=True)
class Limits:
    """What a plan must keep to; None: no limit.

    Attributes:
        memory: bytes of the build.
        bytes_per_token: that a decoded token reads.
        frequency: layer → (E,), how often each expert is chosen; None: alike.
    """

    memory: int | None
    bytes_per_token: int | None
    frequency: Mapping[int, np.ndarray] | None


@dataclass(frozen=True, eq=False)
class Choice:
    """What may be chosen, and what it costs in bytes."""

    damage: Damage
    sizes: SourceSizes
    least: int
    classes: Mapping[str, Mapping[int, int]]  # class → bits it may have → bytes

    @classmethod
    def of(
        cls,
        damage: Damage,
        sizes: SourceSizes,
        least: int | None,
        low_bits: int | None,
        allowed: Collection[int],
        fixed: Mapping[str, int],
    ) -> "Choice":
        text = sizes.args.text_config
        top_k = text.num_experts_per_token
        damage.check_plan(ExpertPlan.identity(text))
        damage.check_alive(top_k)
        if text.num_expert_group > 1:
            raise PlanError(
                f"layer {damage.layers[0]} has {text.num_expert_group} router groups, of "
                "which a build must keep equal parts; budget does not. Plan uniform."
            )
        if low_bits is not None and low_bits != damage.low_bits:
            raise PlanError(
                f"a low bank of {low_bits} bits is asked for, the damage is for "
                f"{damage.low_bits}. Give the damage of that width."
            )
        least = top_k if least is None else least
        if not top_k <= least <= damage.experts:
            raise PlanError(
                f"at least {least} experts are to stay in layer {damage.layers[0]}; wanted "
                f"{top_k} (the router picks as many) to {damage.experts} (all there are)."
            )
        return cls(damage, sizes, least, _class_widths(damage, sizes, allowed, fixed))

    @property
    def pair(self) -> tuple[int, int]:
        """Bytes of a low expert, of a high one."""
        low = StoredFormat("affine", self.damage.low_bits, LOW_GROUP)
        return self.sizes.expert_bytes(low), self.sizes.expert_bytes(HIGH)

    def smallest(self) -> tuple[np.ndarray, dict[str, int]]:
        """The choice that is smallest in memory and per token alike."""
        low, high = self.pair
        order = np.argsort(-self.damage.drop, axis=1, kind="stable")
        states = np.full(self.damage.drop.shape, OFF, np.int8)
        state = SMALL if low < high else LARGE
        np.put_along_axis(states, order[:, : self.least], np.int8(state), axis=1)
        return states, {name: min(found) for name, found in self.classes.items()}

    def check_possible(self, limits: Limits) -> None:
        """Raise PlanError, with the least there can be, if a limit is below it."""
        if limits.memory is None and limits.bytes_per_token is None:
            raise PlanError(
                "a budget plan needs a limit: memory, bytes per token or both."
            )
        plan = self.plan(*self.smallest(), {})
        needs = self.sizes.plan_bytes(plan)
        reads = self.sizes.bytes_per_token(plan, limits.frequency)
        wrong = [
            f"{what} of {limit:,} bytes"
            for what, limit, least in (
                ("memory", limits.memory, needs),
                ("bytes per token", limits.bytes_per_token, reads),
            )
            if limit is not None and limit < least
        ]
        if wrong:
            raise PlanError(
                f"nothing keeps to {' and '.join(wrong)}: the least there can be, "
                f"{self.least} experts in every layer and the narrowest widths allowed, "
                f"has {needs:,} bytes and reads {reads:,} a token. Give at least that, or "
                "allow narrower widths."
            )

    def plan(
        self, states: np.ndarray, bits: Mapping[str, int], about: Mapping[str, Any]
    ) -> ExpertPlan:
        text = self.sizes.args.text_config
        layers = {
            int(layer): LayerPlan(
                tuple(np.flatnonzero(row == LARGE).tolist()),
                tuple(np.flatnonzero(row == SMALL).tolist()),
            )
            for layer, row in zip(self.damage.layers, states, strict=True)
        }
        return ExpertPlan(
            experts=self.damage.experts,
            top_k=text.num_experts_per_token,
            layers=layers,
            groups=text.num_expert_group,
            low_bits=self.damage.low_bits,
            bits={name: width for name, width in bits.items() if width != 16},
            source=self.damage.source,
            about=about,
        )

    def bytes_of(self, states: np.ndarray, bits: Mapping[str, int]) -> int:
        """:meth:`SourceSizes.plan_bytes` of these, without making the plan."""
        low, high = self.pair
        experts = (
            int((states == SMALL).sum()) * low + int((states == LARGE).sum()) * high
        )
        classes = (
            found.get(bits.get(name, 16), found[16])
            for name, found in self.sizes.classes.items()
        )
        return experts + self.sizes.rest + sum(classes)

    def states_of(self, plan: ExpertPlan) -> np.ndarray:
        states = np.full(self.damage.drop.shape, OFF, np.int8)
        for row, layer in zip(states, self.damage.layers, strict=True):
            chosen = plan.layers[int(layer)]
            row[list(chosen.low)], row[list(chosen.high)] = SMALL, LARGE
        return states

    def problem(
        self, memory: float | None, tokens: tuple[float, TokenForm] | None
    ) -> Problem:
        """The solver's problem: limits for experts and classes together."""
        damage, shape = self.damage, self.damage.drop.shape
        cost = np.stack([damage.drop, damage.low, np.zeros(shape)])
        use, limits = [], []
        if memory is not None:
            each = np.array(self.pair, np.float64)[:, None, None]
            use.append(np.broadcast_to(each, (2, *shape)))
            limits.append(memory - self.sizes.rest)
        if tokens is not None:
            limit, form = tokens
            use.append(form.use)
            text = self.sizes.rest - self.sizes.vision
            limits.append(limit - text - form.constant)
        choices = []
        for name, found in self.classes.items():
            options = []
            for bits in sorted(found, reverse=True):
                uses = []
                if memory is not None:
                    uses.append(float(found[bits]))
                if tokens is not None:
                    uses.append(float(self.read_of(name, found[bits])))
                lost = damage.classes[name][bits]
                options.append(Option(lost, tuple(uses)))
            choices.append(tuple(options))
        return Problem(cost, np.stack(use), tuple(choices), self.least, tuple(limits))

    def bits_of(self, picked: tuple[int, ...]) -> dict[str, int]:
        return {
            name: sorted(found, reverse=True)[at]
            for (name, found), at in zip(self.classes.items(), picked, strict=True)
        }

    def read_of(self, name: str, nbytes: int) -> int:
        """Bytes that a token reads of a class of ``nbytes``."""
        text = self.sizes.args.text_config
        if name == EMBEDDING and not text.tie_word_embeddings:
            return round(nbytes / text.vocab_size)
        return nbytes


def _class_widths(
    damage: Damage,
    sizes: SourceSizes,
    allowed: Collection[int],
    fixed: Mapping[str, int],
) -> dict[str, dict[int, int]]:
    """Class → bits that it may have → bytes, the widest first."""
    wrong = sorted({*allowed, *fixed.values()} - set(CLASS_BITS))
    if wrong or not allowed:
        raise PlanError(
            f"classes may have {sorted(allowed)} bits, {dict(fixed)} in particular; wanted "
            f"some of {', '.join(map(str, CLASS_BITS))}."
        )
    refuse_unknown_classes(fixed, sizes.classes)
    found = {}
    for name, nbytes in sizes.classes.items():
        wanted = {fixed[name]} if name in fixed else set(allowed)
        widths = sorted(wanted & set(nbytes), reverse=True) or [16]
        if lacking := [b for b in widths if b not in damage.classes.get(name, {})]:
            raise PlanError(
                f"no damage is known of {name} at {lacking[0]} bits. Measure it, or allow "
                "other widths."
            )
        found[name] = {bits: nbytes[bits] for bits in widths}
    return found
