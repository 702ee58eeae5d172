"""What can be seen to go wrong before hours of work: plan, target, room on the disk."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from ..checkpoint.folder import CONFIG
from ..errors import ConversionError, PlanError
from ..planning.expert_plan import ExpertPlan
from .build_layout import BuildLayout
from .conversion_journal import ConversionJournal, other_files
from .source_files import SourceFiles

#: Room for headers of the file system, index and side files.
SPARE_BYTES = 64_000_000

_FINGERPRINT, _OPTIONAL = "fingerprint", ("moments",)


def check_folders(**folders: Any) -> None:
    """Raise ConversionError unless every value but None can be the path of a folder."""
    for what, value in folders.items():
        if value is None and what in _OPTIONAL:
            continue
        if not isinstance(value, str | os.PathLike) or not str(value):
            raise ConversionError(f"{what} is {value!r}; wanted the path of a folder.")
        try:
            Path(value).exists()
            os.lstat(value)
        except ValueError:
            raise ConversionError(
                f"{what} is {str(value)!r}: no path can hold that. Name another folder."
            ) from None
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.ENOTDIR:
                continue
            raise ConversionError(
                f"{what}: {str(value)[:80]} cannot be looked at: {error.strerror}. Name "
                "another folder."
            ) from error


def read_plan(plan: ExpertPlan | str | Path | None) -> ExpertPlan | None:
    """The plan, or what its file holds; raises PlanError for anything else."""
    if isinstance(plan, str | Path) and str(plan):
        return ExpertPlan.load(plan)
    if plan is not None and not isinstance(plan, ExpertPlan):
        raise PlanError(
            f"the plan is {str(plan)[:80]!r}; wanted an ExpertPlan or the path of its "
            "file, as `kimi-k3 plan` writes it."
        )
    return plan


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
    if out.is_symlink() and not out.exists():
        raise ConversionError(
            f"{out} is a link to {out.readlink()}, which is not there. Make that folder, "
            "or name another."
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


def check_begun(
    out: Path, journal: ConversionJournal | None, resume: bool, layout: BuildLayout
) -> None:
    """Raise ConversionError unless ``resume`` fits what was begun in ``out``."""
    if journal is None:
        shards = {shard.file for shard in layout.shards}
        if resume and shards & set(other_files(out)) and not (out / CONFIG).exists():
            raise ConversionError(
                f"{out} holds shards, but neither {CONFIG}, which ends a conversion and "
                "records what was written, nor the journal of one that was stopped: "
                f"nothing tells whether the shards are whole. Put {CONFIG} back from a "
                "copy, or delete the folder and convert again."
            )
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
