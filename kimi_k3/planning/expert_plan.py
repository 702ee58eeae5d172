"""ExpertPlan: which source experts a build keeps, in which order, and every width.

One value, in a JSON file of its own and inside a build's ``config.json``. What a plan
does to a checkpoint is decided by ``layers``, ``low_bits`` and ``bits`` alone; ``about``
says where it came from.
"""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ..checkpoint.stored_format import StoredFormat
from ..checkpoint.unique_keys import unique_keys
from ..config import TextArgs
from ..errors import PlanError
from .matrix_classes import CLASS_BITS

KIND, VERSION = "a Kimi K3 expert plan", 1

#: How experts of the high bank are stored: as the source has them.
HIGH = StoredFormat("mxfp4", 4, 32)

#: Bits that the low bank can have, and its group size.
LOW_BITS, LOW_GROUP = (2, 3, 4), 64

_KEYS = (
    *("kind", "version", "experts", "top_k", "groups", "low_bits"),
    *("bits", "source", "about", "layers"),
)

#: Router groups that an error lists.
_SHOWN = 16

_REMAKE = "Make it again with `kimi-k3 plan`."


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer by their source numbers, in their new order.

    Attributes:
        high: those that keep the source's MXFP4 bytes; they come first.
        low: those that are quantised again, to the plan's ``low_bits``.
    """

    high: tuple[int, ...]
    low: tuple[int, ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        return self.high + self.low


@dataclass(frozen=True)
class ExpertPlan:
    """What to keep of a source checkpoint, and how.

    Attributes:
        experts: of every MoE layer of the source.
        top_k: experts that the router picks for a token.
        layers: 0-based MoE layer → its experts; every MoE layer is named.
        groups: router groups of the source (``num_expert_group``).
        low_bits: width of the low bank, affine in groups of 64.
        bits: class of matrices → bits (:mod:`.matrix_classes`); a class that is not
            named stays bfloat16.
        source: fingerprints of the checkpoint that the plan was made for
            (:attr:`~kimi_k3.build.saliency.SaliencyTable.source`); empty: any of its
            shape.
        about: kind, criterion, weights, budgets and the like; plain JSON values.

    Raises PlanError, naming layer and expert, for what no router can run.
    """

    experts: int
    top_k: int
    layers: Mapping[int, LayerPlan]
    groups: int = 1
    low_bits: int = 2
    bits: Mapping[str, int] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError(f"the plan names no layer. {_REMAKE}")
        object.__setattr__(self, "layers", dict(sorted(self.layers.items())))
        self._check_counts()
        for layer, plan in self.layers.items():
            self._check_layer(layer, plan)
        if self.low_bits not in LOW_BITS:
            raise PlanError(
                f"the low bank has {self.low_bits} bits; wanted one of "
                f"{', '.join(map(str, LOW_BITS))}. {_REMAKE}"
            )
        for name, bits in self.bits.items():
            if bits not in CLASS_BITS:
                raise PlanError(
                    f"{name} has {bits} bits; wanted one of "
                    f"{', '.join(map(str, CLASS_BITS))}. {_REMAKE}"
                )
        for name in ("source", "about"):
            _refuse_non_finite(getattr(self, name), name)

    @classmethod
    def identity(cls, text: TextArgs) -> Self:
        """Every expert of the source ``text``, in its order, nothing quantised again."""
        return cls(
            experts=text.num_experts,
            top_k=text.num_experts_per_token,
            groups=text.num_expert_group,
            layers={
                layer: LayerPlan(tuple(range(text.experts_in_layer(layer))))
                for layer in range(text.num_hidden_layers)
                if text.is_moe_layer(layer)
            },
            about={"kind": "identity"},
        )

    @property
    def low_format(self) -> StoredFormat:
        return StoredFormat("affine", self.low_bits, LOW_GROUP)

    def order(self, layer: int) -> tuple[int, ...]:
        """Source expert of each new expert of ``layer``; empty for a dense layer.

        The only answer to "which source expert is new expert i".
        """
        return self.layers[layer].order if layer in self.layers else ()

    def split(self, layer: int) -> int:
        """Experts of ``layer`` in the high bank, if it has two banks; else 0."""
        plan = self.layers.get(layer)
        return len(plan.high) if plan is not None and plan.high and plan.low else 0

    def expert_format(self, layer: int) -> StoredFormat:
        """How a layer with one bank stores it."""
        return HIGH if self.layers[layer].high else self.low_format

    def check_fits(self, text: TextArgs) -> None:
        """Raise PlanError if the plan is not one for a source of these sizes."""
        wanted = ExpertPlan.identity(text)
        for name in ("experts", "top_k", "groups"):
            mine, theirs = getattr(self, name), getattr(wanted, name)
            if mine != theirs:
                raise PlanError(
                    f"the plan is for a checkpoint with {name} = {mine}, but this one has "
                    f"{theirs}. Plan with the saliency of this checkpoint."
                )
        widths = text.expert_hidden_size, text.moe_intermediate_size
        low = next((n for n, plan in self.layers.items() if plan.low), None)
        if low is not None and any(width % LOW_GROUP for width in widths):
            raise PlanError(
                f"the plan stores expert {self.layers[low].low[0]} of layer {low} in "
                f"{self.low_bits} bits, in groups of {LOW_GROUP}, but the checkpoint's "
                f"experts have rows of {widths[0]} and {widths[1]}. Plan without a low "
                "width."
            )
        if odd := sorted(self.layers.keys() ^ wanted.layers.keys()):
            where = "lacks" if odd[0] in wanted.layers else "names"
            raise PlanError(
                f"the plan {where} layer {odd[0]}; the checkpoint's MoE layers are "
                f"{min(wanted.layers)} to {max(wanted.layers)}. {_REMAKE}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "kind": KIND,
            "version": VERSION,
            "experts": self.experts,
            "top_k": self.top_k,
            "groups": self.groups,
            "low_bits": self.low_bits,
            "bits": dict(sorted(self.bits.items())),
            "source": dict(self.source),
            "about": dict(self.about),
            "layers": {
                str(layer): {"high": list(plan.high), "low": list(plan.low)}
                for layer, plan in self.layers.items()
            },
        }

    @classmethod
    def from_dict(cls, content: Any) -> Self:
        """Read what :meth:`to_dict` gives; raises PlanError naming what is wrong."""
        if not isinstance(content, dict) or content.get("kind") != KIND:
            raise PlanError(f"it does not hold {KIND}. {_REMAKE}")
        version = content.get("version")
        if type(version) is not int or version != VERSION:
            raise PlanError(
                f"it is a plan of format version {version!r:.60}; this version "
                f"of kimi-k3-mlx reads version {VERSION}. {_REMAKE}"
            )
        _refuse_unknown(content, _KEYS, "it")
        try:
            layers = {
                layer_number(layer): _layer_plan(layer, plan)
                for layer, plan in content["layers"].items()
            }
            return cls(
                experts=_number(content["experts"]),
                top_k=_number(content["top_k"]),
                groups=_number(content["groups"]),
                low_bits=_number(content["low_bits"]),
                bits={str(k): _number(v) for k, v in content["bits"].items()},
                source=dict(content["source"].items()),
                about=dict(content["about"].items()),
                layers=layers,
            )
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(
                f"it is no whole plan: {type(error).__name__}: {error}. {_REMAKE}"
            ) from error

    @property
    def digest(self) -> str:
        """SHA-256, as hex, of what the plan does; ``about`` does not count."""
        content = {k: v for k, v in self.to_dict().items() if k != "about"}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, path: str | Path) -> Path:
        """Write the JSON file ``path``, whole or not at all; where."""
        path = Path(path)
        text = json.dumps(self.to_dict(), allow_nan=False) + "\n"
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            with unfinished.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        except OSError as error:
            raise PlanError(
                f"{path} cannot be written: {error.strerror}. Name another file."
            ) from error
        finally:
            unfinished.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file ``path``; raises PlanError naming it."""
        try:
            content = json.loads(
                Path(path).read_text("utf-8"), object_pairs_hook=unique_keys
            )
        except OSError as error:
            raise PlanError(f"{path} cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{path} is not JSON ({error}). {_REMAKE}") from None
        try:
            return cls.from_dict(content)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error

    def _check_counts(self) -> None:
        for name in ("experts", "top_k", "groups"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise PlanError(
                    f"{name} is {value!r:.60}; wanted a count, 1 or more. {_REMAKE}"
                )
        if self.experts % self.groups:
            raise PlanError(
                f"{self.groups} router groups do not divide {self.experts} experts. "
                f"{_REMAKE}"
            )

    def _check_layer(self, layer: int, plan: LayerPlan) -> None:
        counts = Counter(plan.order)
        for expert, times in counts.items():
            if not 0 <= expert < self.experts:
                raise PlanError(
                    f"layer {layer} keeps expert {expert}, but the source has the experts "
                    f"0 to {self.experts - 1}. {_REMAKE}"
                )
            if times > 1:
                raise PlanError(f"layer {layer} keeps expert {expert} twice. {_REMAKE}")
        if len(counts) < self.top_k:
            raise PlanError(
                f"layer {layer} keeps {len(counts)} experts but the router picks "
                f"{self.top_k}; keep at least as many."
            )
        self._check_groups(layer, plan)

    def _check_groups(self, layer: int, plan: LayerPlan) -> None:
        """Groups must keep equal parts and stay in place: the router counts them off."""
        if self.groups == 1:
            return
        size = self.experts // self.groups
        groups = [expert // size for expert in plan.order]
        kept = Counter(groups)
        if len(kept) < self.groups or len(set(kept.values())) > 1:
            counts = [str(kept[group]) for group in range(min(self.groups, _SHOWN))]
            more = ", …" if self.groups > _SHOWN else ""
            raise PlanError(
                f"layer {layer} keeps [{', '.join(counts)}{more}] experts of its "
                f"{self.groups} router groups; wanted as many of each."
            )
        if groups != sorted(groups):
            at = next(i for i in range(1, len(groups)) if groups[i] < groups[i - 1])
            raise PlanError(
                f"layer {layer} puts expert {plan.order[at]} behind expert "
                f"{plan.order[at - 1]} of a later router group; groups must stay in order."
            )


def _number(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is no whole number")
    return value


def layer_number(text: str) -> int:
    """The layer that a key of a JSON object names; raises ValueError if it is none.

    There is one way to write it, or two keys could name one layer.
    """
    if not (text.isascii() and text.isdecimal()) or str(int(text)) != text:
        raise ValueError(f"{text!r:.60} is no layer")
    return int(text)


def _layer_plan(layer: str, content: Mapping[str, Any]) -> LayerPlan:
    _refuse_unknown(content, ("high", "low"), f"layer {layer}")
    return LayerPlan(*(tuple(map(_number, content[key])) for key in ("high", "low")))


def _refuse_unknown(
    content: Mapping[str, Any], known: tuple[str, ...], where: str
) -> None:
    if odd := [key for key in content if key not in known]:
        raise PlanError(
            f"{where} has the key {odd[0]!r:.60}, which no plan has; there are "
            f"{', '.join(known)}. {_REMAKE}"
        )


def _refuse_non_finite(value: Any, where: str) -> None:
    """JSON has no NaN and no infinity: other readers refuse a file with them."""
    if isinstance(value, float) and not math.isfinite(value):
        raise PlanError(f"{where} is {value}, which JSON cannot hold. {_REMAKE}")
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _refuse_non_finite(inner, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _refuse_non_finite(inner, where)
