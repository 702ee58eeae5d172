"""What can be seen to go wrong before hours of work: plan, target, room on the disk."""

import shutil
from pathlib import Path

from ..errors import ConversionError, PlanError
from ..planning.expert_plan import ExpertPlan
from .conversion_journal import ConversionJournal, other_files
from .source_files import SourceFiles

#: Room for headers of the file system, index and side files.
SPARE_BYTES = 64_000_000

_FINGERPRINT = "fingerprint"


def check_plan(plan: ExpertPlan, source: SourceFiles) -> None:
    """Raise PlanError unless ``plan`` is one for ``source``."""
    plan.check_fits(source.args.text_config)
    found = plan.source.get(_FINGERPRINT)
    if found not in (None, source.fingerprint):
        raise PlanError(
            f"the plan was made for the checkpoint with the fingerprint {found}, but "
            f"{source.folder.path} has {source.fingerprint}. Plan with the saliency of "
            "this checkpoint."
        )


def check_target(source: Path, out: Path) -> None:
    """Raise ConversionError if ``out`` is no folder of its own."""
    one, other = source.resolve(), out.resolve()
    if one == other or one in other.parents or other in one.parents:
        raise ConversionError(
            f"{out} is {'the source' if one == other else 'not apart from the source'} "
            f"{source}. Name another folder, which need not be there yet."
        )
    if out.exists() and not out.is_dir():
        raise ConversionError(f"{out} is not a folder. Name another.")


def check_empty(out: Path) -> None:
    """Raise ConversionError if the locked folder ``out`` holds anything."""
    if found := other_files(out):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ConversionError(
            f"{out} is not empty: it holds {found[0]}{more}. Name an empty folder, or "
            "one that is not there yet."
        )


def check_begun(out: Path, journal: ConversionJournal | None, resume: bool) -> None:
    """Raise ConversionError unless ``resume`` fits what was begun in ``out``."""
    if journal is None:
        check_empty(out)
    elif not resume:
        raise ConversionError(
            f"{out} holds a conversion that was begun ({len(journal.finished)} shards "
            "are finished). --resume goes on with it; or delete the folder."
        )


def check_room(out: Path, nbytes: int) -> None:
    """Raise ConversionError if ``nbytes`` more have no room in the folder ``out``."""
    free, wanted = shutil.disk_usage(out).free, nbytes + SPARE_BYTES
    if free < wanted:
        raise ConversionError(
            f"{out} has {free / 1e9:,.1f} GB free, but {wanted / 1e9:,.1f} GB are still to "
            f"be written ({wanted - free:,} bytes too few). Make room, or name a folder "
            "on another disk."
        )
