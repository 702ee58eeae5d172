"""Whether a build is what the record of its conversion says, without its source.

The plan decides the config (counts, banks, widths), and both decide every tensor: its
name, shape, type and shard. Shards must be those that were written.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..checkpoint.folder import CONFIG, Folder
from ..checkpoint.shard_index import INDEX
from ..checkpoint.stored_format import StoredFormat
from ..checkpoint.unique_keys import unique_keys
from ..config import ModelArgs
from ..conversion.build_config import module_formats
from ..conversion.build_layout import BuildLayout, build_layout
from ..conversion.provenance import RECORD, Provenance, header_sha256
from ..conversion.side_files import GENERATION
from ..errors import ConversionError
from ..models import Model
from ..planning.expert_plan import ExpertPlan
from .verify_report import Check, Finding

#: Differences that a finding lists before it counts the rest.
SHOWN = 3

_AGAIN = "Convert again, or take config.json and shards from one build."


@dataclass(frozen=True)
class RecordedBuild:
    """A folder with the record of its conversion.

    Attributes:
        folder: the build.
        record: of its conversion.
        plan: the record's, or the one that keeps everything.
        layout: every tensor that the folder should hold.
    """

    folder: Folder
    record: Provenance
    plan: ExpertPlan
    layout: BuildLayout

    @classmethod
    def of(cls, folder: Folder) -> "RecordedBuild | None":
        """None for a folder without a record; raises KimiK3Error if it makes no sense."""
        record = Provenance.of_config(folder.config)
        if record is None:
            return None
        source = _unplanned(folder.config, record.plan)
        text = ModelArgs.from_dict(copy.deepcopy(source)).text_config
        plan = record.plan or ExpertPlan.identity(text)
        for layer in sorted(plan.layers.keys() | record.kept.keys()):
            if record.kept.get(layer, ()) != plan.order(layer):
                raise ConversionError(
                    f"the record in config.json keeps other experts in layer {layer} than "
                    f"its plan. {_AGAIN}"
                )
        return cls(folder, record, plan, build_layout(source, plan))

    @cached_property
    def formats(self) -> Mapping[str, StoredFormat]:
        """Module → format of every module that is quantised."""
        config = dict(self.layout.config)
        return module_formats(Model(ModelArgs.from_dict(config)), self.plan)

    @cached_property
    def as_planned(self) -> frozenset[str]:
        """Names of the tensors that are stored with the shape and type they should be."""
        stored = self.folder.tensors
        return frozenset(
            tensor.name
            for shard in self.layout.shards
            for tensor in shard.tensors
            if (found := stored.get(tensor.name)) is not None
            and (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        )


def check_record(build: RecordedBuild) -> Iterator[Check | Finding]:
    """Config, shards and tensors against the record and its plan."""
    config = {k: v for k, v in build.folder.config.items() if k != RECORD}
    yield Check("config", len(list(_leaves(config))), "entries as the plan makes them")
    yield from config_findings(config, build.layout.config)
    yield from _keys_named_twice(build)
    yield from _shards(build)
    yield from _tensors(build)


def config_findings(
    found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> Iterator[Finding]:
    """One finding if the config ``found`` is not ``wanted``; the record is left out."""
    # As JSON, in which 0 is not false, 8 is not 8.0, and null is not nothing.
    have, want = (
        {path: _said(leaf) for path, leaf in _leaves(x)} for x in (found, wanted)
    )
    odd = [path for path in {**have, **want} if have.get(path) != want.get(path)]
    if odd:
        told = [
            f"{'.'.join(p)} is {_short(have.get(p))}, which should be "
            f"{_short(want.get(p))}"
            for p in odd[:SHOWN]
        ]
        more = f" ({len(odd) - SHOWN} more)" if len(odd) > SHOWN else ""
        yield Finding(
            f"config.json is not what its plan makes of the source's: {'; '.join(told)}"
            f"{more}. {_AGAIN}"
        )


def _keys_named_twice(build: RecordedBuild) -> Iterator[Finding]:
    """Which of two values counts depends on who reads the file."""
    for name in (CONFIG, INDEX, GENERATION):
        try:
            text = (build.folder.path / name).read_text("utf-8")
            json.loads(text, object_pairs_hook=unique_keys)
        except OSError:
            continue  # told where it is needed
        except (ValueError, RecursionError) as error:
            yield Finding(f"{name}: {error}. {_AGAIN}")


def _unplanned(config: Mapping[str, Any], plan: ExpertPlan | None) -> dict[str, Any]:
    """The config that the build's was made of, but for its quantisation block."""
    source = copy.deepcopy({k: v for k, v in config.items() if k != RECORD})
    source.pop("quantization", None)
    text = source["text_config"]
    text.pop("expert_bank_split", None)
    text.pop("expert_counts", None)
    if plan is not None:
        text["num_experts"] = plan.experts
    return source


def _leaves(
    value: Any, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _said(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _short(said: str | None) -> str:
    return "absent" if said is None else f"{said:.60}"


def _shards(build: RecordedBuild) -> Iterator[Check | Finding]:
    planned = [shard.file for shard in build.layout.shards]
    looked = 0
    for file in planned:
        recorded, header = build.record.shards.get(file), build.folder.headers.get(file)
        if header is None and file in build.folder.index.shards:
            continue  # why it cannot be read is told already
        if recorded is None or header is None:
            who = "the record in config.json" if recorded is None else "the index"
            yield Finding(f"{who} does not name the shard {file}. {_AGAIN}")
            continue
        looked += 1
        if header.nbytes != recorded.size:
            yield Finding(
                f"{file} is {header.nbytes:,} bytes, but {recorded.size:,} were written: "
                f"it is of another conversion, or was changed. {_AGAIN}"
            )
            continue
        try:
            digest = header_sha256(header.path)
        except OSError as error:
            yield Finding(f"{file} cannot be read: {error.strerror}.")
            continue
        if digest != recorded.header_sha256:
            yield Finding(
                f"the header of {file} is not the one that was written: the shard is of "
                f"another conversion, or was changed. {_AGAIN}"
            )
    for file in sorted(build.record.shards.keys() - set(planned)):
        yield Finding(f"the record names {file}, which the plan does not. {_AGAIN}")
    yield Check(
        "shards", looked, "shards with the recorded size and header", len(planned)
    )


def _tensors(build: RecordedBuild) -> Iterator[Check | Finding]:
    looked = 0
    wanted: set[str] = set()
    for shard in build.layout.shards:
        header = build.folder.headers.get(shard.file)
        wanted |= {tensor.name for tensor in shard.tensors}
        odd: list[str] = []
        for tensor in shard.tensors if header else ():
            found = header.tensors.get(tensor.name) if header else None
            if found is None:
                odd.append(f"{tensor.name} is not in it")
                continue
            looked += 1
            if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                odd.append(
                    f"{tensor.name} is {found.dtype} {found.shape}, which should be "
                    f"{tensor.dtype} {tensor.shape}"
                )
        if odd:
            yield Finding(f"{shard.file}: {listed(odd)}. {_AGAIN}")
    if extra := sorted(build.folder.tensors.keys() - wanted):
        yield Finding(f"the plan makes no tensors such as {listed(extra)}. {_AGAIN}")
    yield Check(
        "layout", looked, "tensors where and as the plan puts them", len(wanted)
    )


def listed(items: list[str]) -> str:
    """The first few of ``items``, and how many more there are."""
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{'; '.join(items[:SHOWN])}{more}"
