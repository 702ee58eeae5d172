"""What is asked of a planner, checked before any work."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ..build.saliency import CRITERIA
from ..errors import PlanError
from .expert_plan import LOW_BITS
from .matrix_classes import CLASS_BITS
from .plan_sizes import SourceSizes
from .scores import DAMAGE

#: Kind of plan → what can be asked of it, besides criterion, weights and bits.
KINDS = {
    "uniform": {"keep", "memory"},
    "global": {"keep", "least", "memory"},
    "graded": {"high", "low", "low_bits", "memory"},
    "budget": {"memory", "bytes_per_token", "least", "low_bits", "allowed_bits"},
}

#: Of these each kind needs one at least.
_SCALES = {
    "uniform": ("keep", "memory"),
    "global": ("keep", "memory"),
    "graded": ("high", "low", "memory"),
    "budget": ("memory", "bytes_per_token"),
}

#: What can only be whole.
_COUNTS = ("high", "low", "least")

#: More bytes, or experts, than anybody has.
_LARGEST = 1e18


@dataclass(frozen=True)
class PlanRequest:
    """Kind, limits and criterion of a plan; None is: not said.

    Attributes:
        kind: a key of :data:`KINDS`.
        keep: experts a layer; for ``global`` on average, and any number.
        high, low: experts a layer in mxfp4, and at ``low_bits``.
        low_bits: width of the low bank; 2 if not said.
        least: experts that every layer keeps.
        memory: bytes of the build's tensors.
        bytes_per_token: bytes of weights that a decoded token may read.
        criterion: a key of :data:`~kimi_k3.build.saliency.CRITERIA`, or ``damage``.
        weights: corpus → its share of the text; of any sum.
        bits: of all classes of matrices, or class → bits; class ``""`` is all others.
        probes: use the probes of ``kimi-k3 damage`` if the calibration has them.
        allowed_bits: that ``budget`` may choose for classes that ``bits`` does not name.
        spelling: how errors write the names of these; their own words if not said.

    Raises PlanError for what contradicts itself or is not of this kind.
    """

    kind: str = "budget"
    keep: float | None = None
    high: int | None = None
    low: int | None = None
    low_bits: int | None = None
    least: int | None = None
    memory: int | None = None
    bytes_per_token: int | None = None
    criterion: str = "reap_sum"
    weights: Mapping[str, float] | None = None
    bits: int | Mapping[str, int] | None = None
    allowed_bits: Collection[int] | None = None
    probes: bool = True
    spelling: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(
                f"no kind of plan is called {self.kind!r}; there are {', '.join(KINDS)}."
            )
        for each in fields(self):
            self._check_option(each.name)
        self._check_scale()
        if self.criterion not in (*CRITERIA, DAMAGE):
            raise PlanError(
                f"no criterion is called {self.criterion!r}; there are "
                f"{', '.join(CRITERIA)} and {DAMAGE}."
            )
        if self.low_bits is not None and self.low_bits not in LOW_BITS:
            raise PlanError(
                f"the low bank is asked to have {self.low_bits} bits; it can have "
                f"{', '.join(map(str, LOW_BITS))}."
            )
        named = self.bits.values() if isinstance(self.bits, Mapping) else [self.bits]
        for bits in (*named, *(self.allowed_bits or ())):
            if bits is not None and bits not in CLASS_BITS:
                raise PlanError(
                    f"a class of matrices is asked to have {bits} bits; it can have "
                    f"{', '.join(map(str, CLASS_BITS))}."
                )
        if self.allowed_bits is not None and not self.allowed_bits:
            raise PlanError("no width is allowed; allow 16 to leave all as it is.")

    def _check_option(self, name: str) -> None:
        offered = set().union(*KINDS.values())
        value = getattr(self, name)
        if name not in offered or value is None:
            return
        if name not in KINDS[self.kind]:
            raise PlanError(
                f"a {self.kind} plan takes no {self._named(name)}; it takes "
                f"{', '.join(sorted(map(self._named, KINDS[self.kind])))}."
            )
        if name in ("low_bits", "allowed_bits"):
            return
        value = self._number(name, value)
        if not 0 <= value < float("inf") or (
            value == 0 and name not in ("high", "low")
        ):
            raise PlanError(f"{self._named(name)} is {value}; wanted more than 0.")

    def _number(self, name: str, value: Any) -> float:
        """``value`` as a number; sizes like 450e9, and counts, become whole."""
        numeric = isinstance(value, int | float) and not isinstance(value, bool)
        finite = numeric and -_LARGEST < value < _LARGEST
        if not finite or (name in _COUNTS and value != int(value)):
            kind = "a whole number" if name in _COUNTS else "a number"
            raise PlanError(f"{self._named(name)} is {value!r}; wanted {kind}.")
        if name != "keep":
            object.__setattr__(self, name, int(value))
            return int(value)
        return value

    def _check_scale(self) -> None:
        scales = _SCALES[self.kind]
        given = [name for name in scales if getattr(self, name) is not None]
        if not given:
            raise PlanError(
                f"a {self.kind} plan needs to know how large it may be: give "
                f"{' or '.join(map(self._named, scales))}."
            )
        if self.memory is not None and self.kind != "budget":
            counts = [name for name in given if name != "memory"]
            if len(counts) == len(scales) - 1:
                told = " and ".join(map(self._named, (*counts, "memory")))
                raise PlanError(
                    f"{told} each tell how many experts stay. Give the counts, or the "
                    "memory for as many as fit."
                )

    def class_bits(self, sizes: SourceSizes) -> dict[str, int]:
        """Class → the bits asked for, of the checkpoint of ``sizes``.

        Bits for all skip the classes that cannot have them; a class that is named must.
        """
        if self.bits is None:
            return {}
        asked = self.bits if isinstance(self.bits, Mapping) else {"": self.bits}
        chosen: dict[str, int] = {}
        for name, bits in asked.items():
            if not name:
                continue
            if name not in sizes.classes:
                raise PlanError(
                    f"no class of matrices is called {name!r}; there are "
                    f"{', '.join(sizes.classes)}."
                )
            if bits not in sizes.classes[name]:
                raise PlanError(
                    f"{name} cannot have {bits} bits: no group size divides its rows. It "
                    "stays bfloat16; leave it out."
                )
            chosen[name] = bits
        if "" in asked:
            for name, found in sizes.classes.items():
                if name not in chosen and asked[""] in found:
                    chosen[name] = asked[""]
        return chosen

    def _named(self, name: str) -> str:
        return self.spelling.get(name, name.replace("_", " "))
