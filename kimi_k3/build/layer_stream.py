"""The decoder layers of a checkpoint of any format, one after the other.

A model that does not fit into memory is run a layer at a time over all tokens. While a
layer computes, a thread reads the next one: two layers are in memory, whatever the
model's depth, and every tensor is read once. The model itself is built lazily and stays
so but for the layer in use.
"""

import hashlib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import cast

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.folder import Folder
from ..checkpoint.names import OTHER_PARTS, PREFIX, Placement, layer_of, place_all
from ..checkpoint.sanitize import module_weights
from ..config import TextArgs
from ..errors import ChangedShardError
from ..folder_check import lazy_model, open_folder
from ..models import Model
from ..models.text import DecoderLayer, TextModel
from .layer_reader import LayerReader

#: A layer's number, or one of the parts outside the layers.
Part = int | str

EMBEDDING, OUTPUT, HEAD = "embedding", "output", "head"


class LayerStream:
    """A checkpoint folder, opened to be run layer by layer.

    Opening reads config, index and headers and checks them against the model, as
    :func:`kimi_k3.folder_check.check_folder` does, in seconds at any size; weights are
    read by :meth:`embed`, :meth:`layers`, :meth:`output` and :meth:`head`. With
    ``dtype`` every floating-point parameter is cast, as ``nn.Module.set_dtype`` does.

    Attributes:
        args: what the config says of the language model.
        model: the whole model; only what is in use at the moment has its weights.
        notes: remarks on the checkpoint for a reader.
        bytes_read: bytes of weights read so far.
    """

    def __init__(self, path: str | Path, *, dtype: mx.Dtype | None = None):
        self.folder: Folder = open_folder(path)
        self.model, notes = lazy_model(self.folder)
        self.notes = (*self.folder.notes, *notes)
        self.model.eval()
        self.args: TextArgs = self.folder.args.text_config
        self.dtype = dtype
        self.bytes_read = 0
        names = [n for n in self.folder.index.shard_of if not n.startswith(OTHER_PARTS)]
        placements = place_all(names, self.args)
        self._reader = LayerReader(self.folder, placements)
        self._names = _names_by_part(placements)
        self._nbytes = {p: self._reader.nbytes(n) for p, n in self._names.items()}
        self._slots = _slots(self.model)

    @property
    def num_layers(self) -> int:
        return self.args.num_hidden_layers

    def nbytes(self, part: Part) -> int:
        """Stored bytes of a layer, or of ``"embedding"``, ``"output"``, ``"head"``."""
        return self._nbytes.get(part, 0)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the config and of every shard's header and size, in hex.

        The same for a copy of the folder; another for other names, shapes, types or
        places of tensors. Values are not read.
        """
        return folder_fingerprint(self.folder)

    @contextmanager
    def embed(self) -> Iterator[Callable[[mx.array], mx.array]]:
        """The embedding, token ids (B, T) → (B, T, D), until the block ends."""
        with self._loaded(EMBEDDING):
            yield self.model.model.embed_tokens

    @contextmanager
    def output(self) -> Iterator[TextModel]:
        """The text model with its final norm, and output mix if it has one, loaded."""
        with self._loaded(OUTPUT):
            yield self.model.model

    @contextmanager
    def head(self) -> Iterator[Callable[[mx.array], mx.array]]:
        """What makes logits (..., vocab) of final hidden states (..., D)."""
        tied = self.args.tie_word_embeddings
        with self._loaded(EMBEDDING if tied else HEAD):
            if tied:
                yield self.model.model.embed_tokens.as_linear
            else:
                yield self.model.language_model.lm_head

    def layers(self, start: int = 0) -> Iterator[tuple[int, DecoderLayer, int]]:
        """Each layer from ``start`` on: its index, the layer, the bytes read for it.

        The layer has its weights until the next is asked for; it may be wrapped from
        outside meanwhile. What is read ahead is one layer. Raises TruncatedShardError
        or ChangedShardError where a shard is not what it was at opening.
        """
        with _ReadAhead(self._reader) as ahead:
            for index in range(start, self.num_layers):
                weights = ahead.take(self._names[index])
                if index + 1 < self.num_layers:
                    ahead.begin(self._names[index + 1])
                with self._filled(index, weights):
                    yield index, self.model.model.layers[index], self.nbytes(index)

    @contextmanager
    def _loaded(self, part: Part) -> Iterator[None]:
        weights = self._reader.read(self._names[part])
        with self._filled(part, weights):
            yield

    @contextmanager
    def _filled(self, part: Part, weights: dict[str, mx.array]) -> Iterator[None]:
        """The parameters of ``part`` in the model while the block runs."""
        self.bytes_read += self.nbytes(part)
        slots = self._slots[part]
        try:
            self._fill(part, weights)
            yield
        finally:
            for module, leaf, stand_in in slots.values():
                module[leaf] = stand_in
            # Or MLX keeps the memory for arrays of the same size, which may not come.
            mx.clear_cache()

    def _fill(self, part: Part, weights: dict[str, mx.array]) -> None:
        """Put ``weights``, which becomes empty, into the model one by one."""
        slots = self._slots[part]
        with warnings.catch_warnings():
            # All that is to be said of the tensors was said at opening.
            warnings.simplefilter("ignore")
            placed = module_weights(
                weights, self.folder.args, self.model, read_values=False
            )
        weights.clear()
        wanted = {name: slot[2].shape for name, slot in slots.items()}
        if {name: array.shape for name, array in placed.items()} != wanted:
            raise ChangedShardError(
                f"{self.folder.path}: the tensors of {_title(part)} are not those that "
                "were there at opening. Start again."
            )
        for name, (module, leaf, _) in slots.items():
            array = placed.pop(name)
            if self.dtype is not None and mx.issubdtype(array.dtype, mx.floating):
                array = array.astype(self.dtype)
            # One at a time: what an array is made of is freed before the next is made.
            mx.eval(array)
            module[leaf] = array


class _ReadAhead:
    """A thread that reads the tensors asked for next."""

    def __init__(self, reader: LayerReader):
        self.reader = reader
        self.stop = Event()
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="kimi-k3-layer-reader")
        self.future = None

    def __enter__(self) -> "_ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.future = None

    def begin(self, names: list[str]) -> None:
        self.future = self.pool.submit(self.reader.read, names, self.stop.is_set)

    def take(self, names: list[str]) -> dict[str, mx.array]:
        """What :meth:`begin` was asked for, or ``names`` if it was not called."""
        if self.future is None:
            self.begin(names)
        assert self.future is not None
        weights, self.future = self.future.result(), None
        return weights


def _part_of(key: str) -> Part:
    """Where the parameter ``key`` belongs."""
    layer = layer_of(key)
    if layer is not None:
        return layer
    if key.startswith(f"{PREFIX}model.embed_tokens."):
        return EMBEDDING
    return HEAD if key.startswith(f"{PREFIX}lm_head.") else OUTPUT


def _title(part: Part) -> str:
    return f"layer {part}" if isinstance(part, int) else f"the {part}"


def _names_by_part(placements: dict[str, Placement]) -> dict[Part, list[str]]:
    names: dict[Part, list[str]] = {}
    for name, placement in placements.items():
        names.setdefault(_part_of(placement.key), []).append(name)
    return names


#: A module, the name of a parameter in it, and what is there while it is not loaded.
_Slot = tuple[nn.Module, str, mx.array]


def _slots(model: Model) -> dict[Part, dict[str, _Slot]]:
    """Every parameter of ``model`` by part and name.

    Modules, not paths: a module that is wrapped from outside is still found.
    """
    slots: dict[Part, dict[str, _Slot]] = {}
    for path, module in model.named_modules():
        for leaf, value in module.items():
            if isinstance(value, mx.array):
                name = f"{path}.{leaf}"
                slots.setdefault(_part_of(name), {})[name] = module, leaf, value
    return slots


def folder_fingerprint(folder: Folder) -> str:
    """See :attr:`LayerStream.fingerprint`."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(_sorted(folder.config)).encode())
    for shard, header in sorted(folder.headers.items()):
        digest.update(f"\n{shard} {header.nbytes}".encode())
        for name, t in sorted(header.tensors.items()):
            digest.update(f"\n{name} {t.dtype} {t.shape} {t.start} {t.stop}".encode())
    return digest.hexdigest()


def _sorted(value: object) -> object:
    """``value`` of a JSON file with its objects' keys in order."""
    if isinstance(value, dict):
        found = cast(dict[str, object], value)
        return {key: _sorted(found[key]) for key in sorted(found)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
