"""What a build says of itself: sizes, formats, experts, where it came from.

Read from its config and the headers of its shards; no weights are read.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import mlx.nn as nn

from ..build.layer_stream import folder_fingerprint
from ..checkpoint.folder import Folder
from ..checkpoint.names import layer_of, place_all
from ..checkpoint.shard_index import read_json
from ..checkpoint.source_layout import full_size_config
from ..config import TextArgs
from ..conversion.provenance import Provenance
from ..conversion.side_files import GENERATION, SAMPLING, is_licence
from ..folder_check import lazy_model, open_folder
from ..planning.matrix_classes import is_class_matrix, matrix_class
from ..planning.plan_sizes import EMBEDDING

#: Parts that are no class of matrices, in the order in which they are told.
EXPERTS, ROUTERS, OTHERS, VISION = (
    *("routed experts", "routers", "norms, convolutions and the like"),
    "vision and other parts",
)

#: What pruning and conversion change in the release's config.
_CHANGED = frozenset(("num_experts", "expert_counts", "expert_bank_split"))

#: Names of stored types that readers know.
_DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}

#: How Moonshot advises to sample.
_ADVICE = {name: float(SAMPLING[name]) for name in ("temperature", "top_p")}

#: A matrix of the source that the model keeps in two halves.
_SPLIT = ".self_attn.kv_b_proj"

_ENDINGS = (".weight", ".scales", ".biases")


@dataclass(frozen=True)
class Part:
    """Tensors that are told of together.

    Attributes:
        formats: how their matrices are stored, as ``"mxfp4 4-bit group 32"``.
    """

    name: str
    formats: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class LayerFacts:
    """One decoder layer.

    Attributes:
        attention: "KDA" or "MLA".
        banks: format → routed experts stored so; empty for a dense layer.
        dropped: experts of the source that are not here; None if that is not known.
    """

    layer: int
    attention: str
    banks: Mapping[str, int]
    dropped: int | None
    nbytes: int

    @property
    def experts(self) -> int:
        return sum(self.banks.values())


@dataclass(frozen=True)
class BuildFacts:
    """All that is told of a build before anything is measured.

    Attributes:
        name: of its folder.
        fingerprint: see :attr:`~kimi_k3.build.layer_stream.LayerStream.fingerprint`.
        tensor_bytes: of all tensors; what must be in memory.
        file_bytes: of the shards, headers included.
        token_bytes: weights that one decoded token of text reads, if routing is even.
        parts: largest things first, adding up to ``tensor_bytes``.
        source_bytes: of the shards that it was converted from; None if not recorded.
        record: of its conversion; None if there is none.
        sampling: what its generation config advises, or Moonshot's advice.
        advised: whether the build itself states all of that.
        licence: name of the licence file that lies in it, or "".
        is_k3: whether it has the released Kimi K3's sizes.
    """

    name: str
    fingerprint: str
    shards: int
    tensors: int
    tensor_bytes: int
    file_bytes: int
    token_bytes: int
    top_k: int
    parts: tuple[Part, ...]
    layers: tuple[LayerFacts, ...]
    source_bytes: int | None
    record: Provenance | None
    sampling: Mapping[str, float]
    advised: bool
    licence: str
    is_k3: bool

    @classmethod
    def of(cls, path: str | Path) -> Self:
        """Look at the folder ``path``; raises the KimiK3Error that says what is wrong."""
        folder = open_folder(path)
        text = folder.args.text_config
        sizes = _Sizes(folder)
        record = Provenance.of_config(folder.config)
        stated = _stated_sampling(folder.path)
        source = None
        if record is not None:
            source = sum(shard.size for shard in record.source.values())
        return cls(
            name=folder.path.resolve().name,
            fingerprint=folder_fingerprint(folder),
            shards=len(folder.headers),
            tensors=len(folder.tensors),
            tensor_bytes=folder.data_bytes,
            file_bytes=sum(header.nbytes for header in folder.headers.values()),
            token_bytes=round(sizes.token),
            top_k=text.num_experts_per_token,
            parts=sizes.parts(),
            layers=tuple(_layers(text, sizes, record)),
            source_bytes=source,
            record=record,
            sampling={**_ADVICE, **stated},
            advised=stated.keys() == _ADVICE.keys(),
            licence=next(
                (p.name for p in sorted(folder.path.iterdir()) if is_licence(p.name)),
                "",
            ),
            is_k3=_is_release(folder.config),
        )

    @property
    def expert_formats(self) -> tuple[str, ...]:
        """Formats of routed experts, the widest first as the build has them."""
        found = dict.fromkeys(name for layer in self.layers for name in layer.banks)
        return tuple(found)

    @property
    def experts(self) -> int:
        return sum(layer.experts for layer in self.layers)

    @property
    def source_experts(self) -> int | None:
        """Routed experts of the source; None if that is not known."""
        counts = [(layer.experts, layer.dropped) for layer in self.layers]
        if any(kept and dropped is None for kept, dropped in counts):
            return None
        return sum(kept + (dropped or 0) for kept, dropped in counts)


class _Sizes:
    """Bytes of a folder's tensors, by part and by layer."""

    def __init__(self, folder: Folder) -> None:
        text = folder.args.text_config
        self.formats = _Formats(folder)
        self.by_part: dict[str, int] = defaultdict(int)
        self.by_layer: dict[int, int] = defaultdict(int)
        self.token = 0.0
        tensors = folder.tensors
        placed = place_all(tensors, text)
        for name, tensor in tensors.items():
            if name not in placed:
                self.by_part[VISION] += tensor.nbytes
                continue
            key = placed[name].key
            part = self.formats.part(key, tensor.dtype)
            self.by_part[part] += tensor.nbytes
            layer = layer_of(key)
            if layer is not None:
                self.by_layer[layer] += tensor.nbytes
            self.token += tensor.nbytes * _share_read(part, layer, text)

    def parts(self) -> tuple[Part, ...]:
        """The parts, experts first, then classes by size, then the others."""
        last = (ROUTERS, OTHERS, VISION)
        order = sorted(
            self.by_part,
            key=lambda name: (
                not name.startswith(EXPERTS),
                last.index(name) if name in last else -1,
                -self.by_part[name],
            ),
        )
        return tuple(
            Part(name, self.formats.of_part(name), self.by_part[name]) for name in order
        )


class _Formats:
    """Which part each parameter belongs to, and how the part is stored."""

    def __init__(self, folder: Folder) -> None:
        self.text = folder.args.text_config
        self.modules = dict(lazy_model(folder)[0].named_modules())
        self.found: dict[str, dict[str, None]] = defaultdict(dict)
        #: The release has half a million tensors and few thousand parameters.
        self.part = cache(self._part)

    def _part(self, key: str, dtype: str) -> str:
        """The part of the parameter ``key``, which is stored as ``dtype``."""
        path = key
        for ending in _ENDINGS:
            path = path.removesuffix(ending)
        module = self.modules.get(path)
        stored = self.stored(module, dtype)
        if ".switch_mlp" in path:
            name = f"{EXPERTS}, {stored}"
        elif ".mlp.gate" in path and not path.endswith("gate_proj"):
            name = ROUTERS
        elif ".e_score_correction_bias" in path:
            return ROUTERS
        elif path.endswith(_SPLIT) or (
            module is not None and is_class_matrix(path, module)
        ):
            name = matrix_class(path, self.text)
        else:
            return OTHERS
        if key.endswith(".weight"):
            self.found[name][stored] = None
        return name

    def of_part(self, name: str) -> tuple[str, ...]:
        return tuple(self.found.get(name, ()))

    def banks(self, layer: int) -> dict[str, int]:
        """Format → routed experts of ``layer``."""
        count, split = self.text.experts_in_layer(layer), self.text.bank_split(layer)
        if not count:
            return {}
        prefix = f"language_model.model.layers.{layer}.mlp.switch_mlp."
        if not split:
            return {self.stored(self.modules[f"{prefix}up_proj"], "BF16"): count}
        high, low = (
            self.stored(self.modules[f"{prefix}{bank}.up_proj"], "BF16")
            for bank in ("bank_hi", "bank_lo")
        )
        if high == low:
            return {high: count}
        return {high: split, low: count - split}

    @staticmethod
    def stored(module: nn.Module | None, dtype: str) -> str:
        """A quantised module's format, or the name of what is stored."""
        bits: Any = getattr(module, "bits", None)
        if bits is None:
            return _DTYPES.get(dtype, dtype)
        mode: Any = getattr(module, "mode", "affine")
        return f"{mode} {bits}-bit"


def _layers(
    text: TextArgs, sizes: _Sizes, record: Provenance | None
) -> Iterable[LayerFacts]:
    plan = None if record is None else record.plan
    for layer in range(text.num_hidden_layers):
        banks = sizes.formats.banks(layer)
        dropped = None
        if banks and plan is not None:
            dropped = plan.experts - sum(banks.values())
        elif banks and record is not None:
            dropped = 0
        yield LayerFacts(
            layer=layer,
            attention="KDA" if text.is_kda_layer(layer) else "MLA",
            banks=banks,
            dropped=dropped,
            nbytes=sizes.by_layer[layer],
        )


def _share_read(part: str, layer: int | None, text: TextArgs) -> float:
    """Share of a part's bytes that a decoded token reads, if routing is even."""
    if part == VISION:
        return 0.0
    if part.startswith(EXPERTS) and layer is not None:
        return text.num_experts_per_token / text.experts_in_layer(layer)
    if part == EMBEDDING and not text.tie_word_embeddings:
        return 1 / text.vocab_size
    return 1.0


def _stated_sampling(path: Path) -> dict[str, float]:
    """Temperature and top-p, as far as the build states them."""
    if not (path / GENERATION).is_file():
        return {}
    stated = read_json(path / GENERATION)
    return {name: float(stated[name]) for name in _ADVICE if name in stated}


def _is_release(config: Mapping[str, Any]) -> bool:
    """Whether ``config`` has the release's sizes, as far as pruning leaves them."""
    mine, theirs = config.get("text_config", {}), full_size_config()["text_config"]
    return "hidden_size" in mine and _agrees(mine, theirs)


def _agrees(mine: Any, theirs: Any) -> bool:
    """Whether all that ``mine`` states of ``theirs`` is the same."""
    if not (isinstance(mine, dict) and isinstance(theirs, dict)):
        return mine == theirs
    return all(
        _agrees(mine.get(key, value), value)
        for key, value in theirs.items()
        if key not in _CHANGED
    )
