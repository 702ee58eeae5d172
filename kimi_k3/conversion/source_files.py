"""A checkpoint in Moonshot's own format, opened to be converted."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import mlx.core as mx

from ..build.layer_reader import LayerReader, truncated
from ..build.layer_stream import folder_fingerprint
from ..checkpoint.agreement import NAN_SCALE
from ..checkpoint.folder import Folder
from ..checkpoint.headers import StoredTensor
from ..checkpoint.names import OTHER_PARTS, layer_of, place_all
from ..checkpoint.source_layout import SourceTensor, expert_prefix, source_tensors
from ..config import ModelArgs
from ..errors import CheckpointError, ConversionError
from ..folder_check import open_folder
from .build_config import EXPERT_MATRICES
from .byte_copy import ByteCopier
from .shard_writer import ShardWriter

#: The source's name of each matrix of an expert.
EXPERT_PARTS = dict(zip(EXPERT_MATRICES, ("w1", "w3", "w2"), strict=True))

_WANTED = (
    "Convert from Moonshot's own checkpoint, as `hf download` gives it: what was dropped "
    "or rounded by another tool cannot be put back."
)


class SourceFiles:
    """The shards of a source folder as they were when it was opened.

    Opening reads config, index and headers only. Raises the KimiK3Error that names the
    first fault: a folder that is not whole, ConversionError for one of another format.
    """

    def __init__(self, path: str | Path):
        self.folder: Folder = open_folder(path)
        self.args: ModelArgs = self.folder.args
        check_release_format(self.folder)
        self.tensors = self.folder.tensors
        self.shard_of = self.folder.index.shard_of
        text = [name for name in self.tensors if not name.startswith(OTHER_PARTS)]
        self.reader = LayerReader(self.folder, place_all(text, self.args.text_config))
        self._copier = ByteCopier()

    @cached_property
    def fingerprint(self) -> str:
        """As :attr:`kimi_k3.build.layer_stream.LayerStream.fingerprint`."""
        return folder_fingerprint(self.folder)

    @cached_property
    def plain_names(self) -> dict[int | None, list[str]]:
        """Layer → its tensors but the experts'; None: what belongs to no layer."""
        found: dict[int | None, list[str]] = {}
        for name in self.reader.placements:
            if ".experts." not in name:
                found.setdefault(layer_of(name), []).append(name)
        return found

    @property
    def vision_names(self) -> list[str]:
        return [name for name in self.tensors if name not in self.reader.placements]

    def stamps(self, names: Iterable[str]) -> dict[str, int]:
        """Shard → time of its last change (ns), of the shards that hold ``names``."""
        shards = sorted({self.shard_of[name] for name in names})
        return {shard: self.reader.stamps[shard][1] for shard in shards}

    def expert(self, layer: int, expert: int) -> dict[str, tuple[mx.array, mx.array]]:
        """Matrix → its MXFP4 codes (out, words) uint32 and scales (out, groups) uint8."""
        prefix = expert_prefix(layer, expert)
        names = [
            f"{prefix}{part}.weight_{kind}"
            for part in EXPERT_PARTS.values()
            for kind in ("packed", "scale")
        ]
        found = self.reader.read(names)
        return {
            matrix: (
                mx.view(found[f"{prefix}{part}.weight_packed"], mx.uint32),
                found[f"{prefix}{part}.weight_scale"],
            )
            for matrix, part in EXPERT_PARTS.items()
        }

    def copy(
        self, pieces: Iterable[tuple[str, str, int]], writer: ShardWriter
    ) -> Iterable[int]:
        """Copy whole tensors: each piece is a source name, a target and its first byte.

        Files are read from start to end. Yields the bytes of each piece when it is
        copied. Raises TruncatedShardError or ChangedShardError for a shard that is not
        what it was, CheckpointError for scales that are no numbers.
        """
        shards: dict[str, list[tuple[StoredTensor, str, str, int]]] = {}
        for name, target, start in pieces:
            piece = self.tensors[name], name, target, start
            shards.setdefault(self.shard_of[name], []).append(piece)
        for shard, found in sorted(shards.items()):
            found.sort(key=lambda piece: piece[0].start)
            header = self.folder.headers[shard]
            with self.reader.open(shard) as file:
                for tensor, name, target, start in found:
                    if name.endswith(".weight_scale"):
                        file.seek(tensor.start)
                        scales = file.read(tensor.nbytes)
                        copied = len(scales)
                        _check_scales(shard, name, scales)
                        writer.put_bytes(target, scales, start)
                    else:
                        copied = writer.copy(
                            target,
                            start,
                            self._copier,
                            file,
                            tensor.start,
                            tensor.nbytes,
                        )
                    if copied < tensor.nbytes:
                        raise truncated(header, tensor.start + copied)
                    yield copied
                self.reader.check_unchanged(shard, file)


def check_release_format(folder: Folder) -> None:
    """Raise ConversionError unless ``folder`` holds what the release's format has.

    Every tensor of the config, no other, in its shape and stored type; ``A_log`` may be
    padded behind the heads.
    """
    found = folder.tensors
    if odd := next((name for name in found if ".switch_mlp." in name), None):
        raise ConversionError(
            f"{folder.path} is a build in MLX's format: it holds {odd}. {_WANTED}"
        )
    heads = folder.args.text_config.linear_attn_config.num_heads
    count = 0
    for wanted in source_tensors(folder.args):
        tensor = found.get(wanted.name)
        if tensor is None:
            raise ConversionError(
                f"{folder.path} lacks {wanted.name}, which the release's format has for "
                f"this config.json. {_WANTED}"
            )
        if not _fits(tensor, wanted, heads):
            raise ConversionError(
                f"{folder.path}: {wanted.name} is stored as {tensor.dtype} "
                f"{tensor.shape}, but the release's format is {wanted.dtype} "
                f"{wanted.shape}. {_WANTED}"
            )
        count += 1
    if count < len(found):
        names = {wanted.name for wanted in source_tensors(folder.args)}
        odd = next(name for name in found if name not in names)
        raise ConversionError(
            f"{folder.path} holds {odd}, which the release's format does not have for "
            f"this config.json. {_WANTED}"
        )


def _fits(tensor: StoredTensor, wanted: SourceTensor, heads: int) -> bool:
    if tensor.dtype != wanted.dtype:
        return False
    if wanted.name.endswith(".A_log"):
        return tensor.nbytes >= 4 * heads
    return tensor.shape == wanted.shape


def _check_scales(shard: str, name: str, scales: bytes) -> None:
    if NAN_SCALE in scales:
        raise CheckpointError(
            f"{shard}: {name} holds the scale byte {NAN_SCALE}, which means NaN; the "
            "shard is damaged. Download it again."
        )
