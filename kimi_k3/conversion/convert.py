"""Converts a checkpoint of Moonshot's format into a build, shard by shard, by a plan.

Experts that are kept as they are go through as bytes, everything else a layer without
its experts at a time. One shard is made durable while the next is written;
``config.json``, without which no loader takes a folder for a build, is written last.
"""

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from ..build.saliency import TOOL
from ..checkpoint.folder import CONFIG, read_config
from ..checkpoint.shard_index import INDEX
from ..errors import ConversionError
from ..machine.hardware import read_machine
from ..planning.expert_plan import ExpertPlan
from .build_layout import BuildLayout, build_layout
from .conversion_journal import Conditions, ConversionJournal, locked
from .conversion_run import ConversionRun, Tell, Watch
from .convert_checks import (
    check_begun,
    check_plan,
    check_room,
    check_target,
)
from .convert_shard import ShardMaker, quantised_modules
from .durable_files import write_durably
from .importance import Importance
from .provenance import RECORD, Provenance, ShardRecord, config_text
from .shard_writer import shard_size
from .side_files import without_code, write_side_files
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
            byte. A finished one is left as it is.
        hash_source: record the SHA-256 of every source shard, and hold it against the
            hub's where that is known.
        progress: is shown how far it is, piece by piece.
        tell: is given remarks for a reader.

    Raises the KimiK3Error that says what is wrong, before any work if it can be seen by
    then: PlanError, ConversionError, or of a damaged source CheckpointError.
    """
    tell = tell or (lambda text: None)
    if isinstance(plan, str | Path):
        plan = ExpertPlan.load(plan)
    out = Path(out)
    check_target(Path(source), out)
    files = SourceFiles(source)
    for note in files.folder.notes:
        tell(note)
    maker = _maker(files, plan, moments, tell)
    now = _conditions(maker)
    with locked(out):
        journal = ConversionJournal.read(out)
        if resume and journal is None and _is_finished(out, maker, plan, now):
            tell(f"{out} holds this conversion, finished; there is nothing to do.")
            return out
        check_begun(out, journal, resume)
        if journal is None:
            journal = ConversionJournal(out, now)
        journal.check(now)
        run = ConversionRun(maker, journal, hash_source, progress, tell)
        check_room(out, sum(shard_size(shard.tensors) for shard in run.left))
        run.write_shards()
        with run.writing():
            _write_small_files(maker, plan, journal, hash_source)
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
    return replace(maker, importance=Importance(moments, files.fingerprint, modules))


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


def _is_finished(
    out: Path, maker: ShardMaker, plan: ExpertPlan | None, now: Conditions
) -> bool:
    """Whether ``out`` holds this very conversion, whole."""
    if not (out / CONFIG).is_file():
        return False
    record = Provenance.of_config(read_config(out))
    if record is None:
        return False
    planned = plan and plan.digest, record.plan and record.plan.digest
    if (record.fingerprint, record.moments or "") != (now.source, now.moments) or (
        planned[0] != planned[1]
    ):
        raise ConversionError(
            f"{out} holds another conversion, which is finished. Name another folder."
        )
    for file, shard in record.shards.items():
        path = out / file
        if not path.is_file() or ShardRecord.of(path) != shard:
            raise ConversionError(
                f"{path} is not as it was written. Delete {out} and convert again."
            )
    return True


def _write_small_files(
    maker: ShardMaker,
    plan: ExpertPlan | None,
    journal: ConversionJournal,
    hash_source: bool,
) -> None:
    """Index and side files, then ``config.json`` with the record of the conversion."""
    out, layout = journal.out, maker.layout
    write_durably(out / INDEX, index_text(layout).encode())
    write_side_files(maker.source.folder.path, out)
    record = Provenance(
        tool={"kimi-k3-mlx": journal.conditions.tool, "mlx": journal.conditions.mlx},
        plan=plan,
        kept={layer: maker.plan.order(layer) for layer in maker.plan.layers},
        fingerprint=journal.conditions.source,
        source=_source_records(maker.source, journal if hash_source else None),
        shards={
            shard.file: journal.finished[shard.file].record for shard in layout.shards
        },
        moments=journal.conditions.moments or None,
    )
    config = without_code(dict(layout.config)) | {RECORD: record.to_dict()}
    write_durably(out / CONFIG, config_text(config).encode())


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


def index_text(layout: BuildLayout) -> str:
    """``model.safetensors.index.json`` of a build."""
    index = {
        "metadata": {"total_size": layout.nbytes},
        "weight_map": dict(sorted(layout.weight_map.items())),
    }
    return json.dumps(index, indent=1) + "\n"
