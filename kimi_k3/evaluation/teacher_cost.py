"""What making a teacher will take: bytes, memory, disk and hours, beforehand.

Counted from a config; a pass is that of a calibration without moments
(:mod:`~kimi_k3.build.calibration_cost`), and final states and head come on top.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..build.calibration_cost import SPEEDS, Estimate, Speed, calibration_cost
from ..build.calibration_storage import ITEM_BYTES
from ..config import ModelArgs

#: Checkpoints of so many bytes are spoken of in GB.
_LARGE = 10_000_000_000

_ASSUMED = """\
A build is judged in the same way: its own bytes are read instead, the hidden states are as
large, and nothing stays but some 40 bytes a prediction. --memory-limit bounds the hidden
states held alone. Hours are counted for sustained speeds, nothing was measured; the slower
of reading and computing counts. Making the samples is not included."""


@dataclass(frozen=True)
class TeacherCost:
    """The answer. Sizes are bytes.

    Attributes:
        rows, length: of the samples; padding is computed like any token.
        read: of the checkpoint, each byte once.
        memory, disk: by part; ``disk`` while it runs.
        kept: what stays.
        flop: operations, in all.
        estimates: hours, one a speed.
    """

    rows: int
    length: int
    read: int
    memory: Mapping[str, int]
    disk: Mapping[str, int]
    kept: int
    flop: int
    estimates: Sequence[Estimate]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def text(self) -> str:
        """For a reader."""
        unit, scale = ("GB", 1e9) if self.read >= _LARGE else ("MB", 1e6)

        def line(what: str, nbytes: int) -> str:
            return f"{what:44}{nbytes / scale:12,.2f} {unit}"

        lines = [
            f"{self.rows:,} rows of {self.length:,} tokens, one at a time",
            "",
            line("read of the checkpoint, each byte once", self.read),
            line("peak memory", sum(self.memory.values())),
            *(line(f"  {part}", n) for part, n in self.memory.items()),
            line("disk while it runs", sum(self.disk.values())),
            *(line(f"  {part}", n) for part, n in self.disk.items()),
            line("  of which stays", self.kept),
            f"{'arithmetic':44}{self.flop / 1e15:12,.2f} PFLOP",
            "",
            *(
                f"{e.speed.disk / 1e9:5g} GB/s {e.speed.compute / 1e12:5g} TFLOPS"
                f"{e.hours:10.3g} hours"
                for e in self.estimates
            ),
            "",
            _ASSUMED,
        ]
        return "\n".join(lines)


def teacher_cost(
    args: ModelArgs,
    *,
    rows: int,
    length: int,
    memory_limit: int,
    speeds: Sequence[Speed] = SPEEDS,
) -> TeacherCost:
    """What :func:`~.evaluate.make_teacher` takes of the source format of ``args``."""
    cost = calibration_cost(
        args,
        rows=rows,
        length=length,
        step_tokens=length,
        memory_limit=memory_limit,
        moments=False,
        speeds=speeds,
    )
    tied = args.text_config.tie_word_embeddings
    head = cost.sizes.embedding if tied else cost.sizes.not_read["head"]
    final = rows * length * args.text_config.hidden_size * ITEM_BYTES
    states = {part: n for part, n in cost.disk.items() if not part.startswith("sums")}
    states.pop("input moments")
    return TeacherCost(
        rows=rows,
        length=length,
        read=cost.sizes.read + cost.sizes.not_read.get("final norm", 0) + head,
        memory={part: n for part, n in cost.memory.items() if n},
        disk={**states, "final hidden states": final, "head": head},
        kept=final + head,
        flop=sum(cost.flop.values()),
        estimates=cost.estimates,
    )
