"""Macs that can hold a build, and how fast each can decode: counted, not measured.

Memory and bandwidth are Apple's published specifications. A decoded token reads a known
number of bytes, so a machine's bandwidth bounds its tokens a second; the share that is
reached is one published measurement.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import KimiK3Error
from .hardware import memory_for_gpu

GIB = 2**30

#: Share of the bandwidth that decoding is expected to reach: a single-bank build of 242
#: of 896 experts was published to decode 5.51 tokens/s on an M3 Ultra (819 GB/s), at
#: 25.8 GB of routed experts and 60.8 GB of everything else a token.
PUBLISHED = {"tokens_per_second": 5.51, "bytes_per_token": 86.6e9, "bandwidth": 819e9}
REACHED = round(
    PUBLISHED["tokens_per_second"]
    * PUBLISHED["bytes_per_token"]
    / PUBLISHED["bandwidth"],
    2,
)


@dataclass(frozen=True)
class Mac:
    """One kind of machine, or several of them that share a model by tensor parallelism.

    Attributes:
        memory: GiB of one machine, which Apple calls GB.
        bandwidth: bytes a second of one machine.
        count: machines; each holds and reads its part.
    """

    name: str
    memory: int
    bandwidth: float
    count: int = 1

    def __post_init__(self) -> None:
        for name in ("memory", "bandwidth", "count"):
            if not 0 < getattr(self, name) < float("inf"):
                raise KimiK3Error(
                    f"{self.name}: {name} is {getattr(self, name)}, wanted more than 0."
                )

    @property
    def label(self) -> str:
        times = f"{self.count} × " if self.count > 1 else ""
        return f"{times}{self.name}, {self.memory} GB"

    @property
    def usable(self) -> int:
        """Bytes that weights, caches and activations can have, once macOS is told so.

        ``kimi-k3 doctor`` prints the command; until then it is about 3/4 of the memory.
        """
        return self.count * memory_for_gpu(self.memory * GIB)


#: From the smallest that is of use to four of the largest.
MACS = (
    Mac("M4 Max", 128, 546e9),
    Mac("M1 Ultra", 128, 800e9),
    Mac("M2 Ultra", 192, 800e9),
    Mac("M3 Ultra", 96, 819e9),
    Mac("M3 Ultra", 256, 819e9),
    Mac("M3 Ultra", 512, 819e9),
    Mac("M3 Ultra", 512, 819e9, count=2),
    Mac("M3 Ultra", 512, 819e9, count=4),
)


@dataclass(frozen=True)
class Prediction:
    """A build on a :class:`Mac`; sizes are bytes, rates tokens a second.

    Attributes:
        usable: what the GPUs can have of the memory, at most.
        room: what is left of it beside the weights, for the KV cache, activations and
            the buffers of a prompt; negative if the weights alone are too much.
        ceiling: bandwidth over bytes per token; nothing decodes faster. Of several
            machines an upper estimate: as if all weights were split evenly, and the
            connection took no time.
        expected: the published share :data:`REACHED` of the ceiling.
        arithmetic: how both come about.
    """

    machine: Mac
    usable: int
    room: int
    ceiling: float
    expected: float
    arithmetic: str

    @property
    def fits(self) -> bool:
        """Whether the weights fit; what else needs memory is not asked."""
        return self.room >= 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = asdict(self)
        return {"name": self.machine.label, **found, "fits": self.fits}


def predict(
    nbytes: int, bytes_per_token: float, machines: Sequence[Mac] = MACS
) -> tuple[Prediction, ...]:
    """How a build of ``nbytes`` that reads ``bytes_per_token`` runs on each machine."""
    if not 0 < bytes_per_token <= nbytes:
        raise KimiK3Error(
            f"a token is said to read {bytes_per_token} of {nbytes} bytes; wanted more "
            "than 0, and no more than all."
        )
    found = []
    for mac in machines:
        ceiling = mac.count * mac.bandwidth / bytes_per_token
        expected = REACHED * ceiling
        times = f"{mac.count} × " if mac.count > 1 else ""
        found.append(
            Prediction(
                machine=mac,
                usable=mac.usable,
                room=mac.usable - nbytes,
                ceiling=ceiling,
                expected=expected,
                arithmetic=f"{times}{mac.bandwidth / 1e9:g} GB/s / "
                f"{bytes_per_token / 1e9:.2f} GB = {ceiling:.2f} tokens/s; "
                f"× {REACHED:g} = {expected:.2f}",
            )
        )
    return tuple(found)
