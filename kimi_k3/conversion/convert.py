"""Converts a checkpoint of Moonshot's format into a build, shard by shard, by a plan.

Experts that are kept as they are go through as bytes, everything else a layer without
its experts at a time. One shard is made durable while the next is written;
``config.json``, without which no loader takes a folder for a build, is written last.
"""

from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from ..build.saliency import TOOL
from ..machine.hardware import read_machine
from ..planning.expert_plan import ExpertPlan
from ..tokenizer.files import CONFIG_FILE, VOCAB_FILE
from .build_layout import build_layout
from .conversion_journal import Conditions, ConversionJournal, locked
from .conversion_run import ConversionRun, Tell, Watch, show_hashing
from .convert_checks import (
    check_begun,
    check_folders,
    check_plan,
    check_room,
    check_target,
    read_plan,
)
from .convert_shard import ShardMaker, quantised_modules
from .finished_build import complete, finished_record, with_source_hashes
from .importance import Importance, importance_shapes
from .provenance import Provenance, ShardRecord
from .shard_writer import shard_size
from .side_files import has_tokenizer, left_out
from .small_files import SmallFiles
from .source_files import SourceFiles


def convert(
    source: str | Path,
    out: str | Path,
    plan: ExpertPlan | str | Path | None = None,
    *,
    moments: str | Path | None = None,
    resume: bool = False,
    hash_source: bool = False,
    progress: Watch | None = None,
    tell: Tell | None = None,
) -> Path:
    """Convert the checkpoint ``source`` into the new folder ``out``, which is returned.

    Args:
        source: a folder in Moonshot's own format.
        out: not there yet, or empty; with ``resume`` one in which this conversion was
            begun.
        plan: a plan or its file; None keeps every expert and every matrix as it is.
        moments: a calibration of ``source``: what is quantised loses least where inputs
            are large. None: all input channels count alike.
        resume: go on with a conversion that was stopped; the result is the same, to the
            byte. A finished one keeps its shards; what is missing or changed beside them
            is written again.
        hash_source: record the SHA-256 of every source shard, and hold it against the
            hub's where that is known.
        progress: is shown how far it is, piece by piece.
        tell: is given remarks for a reader.

    Raises the KimiK3Error that says what is wrong, before any work if it can be seen by
    then: PlanError, ConversionError, or of a damaged source CheckpointError.
    """
    tell = tell or (lambda text: None)
    check_folders(source=source, out=out, moments=moments)
    plan = read_plan(plan)
    source, out = Path(source), Path(out)
    check_target(source, out)
    files = SourceFiles(source)
    for note in files.folder.notes:
        tell(note)
    maker = _maker(files, plan, moments, tell)
    small = SmallFiles.of(source, maker.layout)
    _tell_what_is_not_copied(source, tell)
    now = _conditions(maker)
    with locked(out):
        journal = ConversionJournal.read(out)
        if resume and journal is None and (record := finished_record(out, plan, now)):
            if hash_source:
                show = partial(show_hashing, progress, len(maker.layout.shards))
                record = with_source_hashes(record, files, show)
            complete(out, small, record, tell)
            return out
        check_begun(out, journal, resume, maker.layout)
        if journal is None:
            journal = ConversionJournal(out, now)
        journal.check(now)
        run = ConversionRun(maker, journal, hash_source, progress, tell)
        check_room(out, sum(shard_size(shard.tensors) for shard in run.left))
        run.write_shards()
        with run.writing():
            small.write(out, _record(maker, plan, journal, hash_source))
            journal.close()
    return out


def _maker(
    files: SourceFiles,
    plan: ExpertPlan | None,
    moments: str | Path | None,
    tell: Tell,
) -> ShardMaker:
    """What shards are made from; raises if the parts do not fit each other."""
    wanted = plan or ExpertPlan.identity(files.args.text_config)
    check_plan(wanted, files)
    layout = build_layout(files.folder.config, wanted)
    maker = ShardMaker(files, wanted, layout)
    modules = quantised_modules(layout, wanted)
    if moments is None:
        return maker
    if not modules:
        tell(f"{moments} is not used: nothing is quantised again.")
        return maker
    importance = Importance(moments, files.fingerprint, modules)
    importance.check(importance_shapes(layout, wanted, modules))
    return replace(maker, importance=importance)


def _tell_what_is_not_copied(source: Path, tell: Tell) -> None:
    if names := left_out(source):
        tell(f"left out of the build: {', '.join(names)}.")
    if not has_tokenizer(source):
        tell(
            f"WARNING: {source} holds no tokenizer ({VOCAB_FILE}, {CONFIG_FILE}): the "
            "build will have none either, so nobody can chat with it, and `kimi-k3 verify` "
            "will find fault with it. Download both into the source; --resume copies them, "
            "into a finished build, too."
        )


def _conditions(maker: ShardMaker) -> Conditions:
    importance = maker.importance
    return Conditions(
        source=maker.source.fingerprint,
        plan=maker.plan.digest,
        moments="" if importance is None else importance.digest,
        tool=TOOL.split()[-1],
        mlx=version("mlx"),
        device=read_machine().device if maker.quantised else "",
    )


def _record(
    maker: ShardMaker,
    plan: ExpertPlan | None,
    journal: ConversionJournal,
    hash_source: bool,
) -> Provenance:
    """What was done, for ``config.json``."""
    return Provenance(
        tool={"kimi-k3-mlx": journal.conditions.tool, "mlx": journal.conditions.mlx},
        plan=plan,
        kept={layer: maker.plan.order(layer) for layer in maker.plan.layers},
        fingerprint=journal.conditions.source,
        source=_source_records(maker.source, journal if hash_source else None),
        shards={
            shard.file: journal.finished[shard.file].record
            for shard in maker.layout.shards
        },
        moments=journal.conditions.moments or None,
    )


def _source_records(
    source: SourceFiles, journal: ConversionJournal | None
) -> dict[str, ShardRecord]:
    """Source shard → what it is; with ``journal`` the hashes that it knows."""
    found = {}
    for shard, header in sorted(source.folder.headers.items()):
        record = ShardRecord.of(header.path)
        if journal is not None:
            record = replace(record, sha256=journal.hashes[shard][0])
        found[shard] = record
    return found
