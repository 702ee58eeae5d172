"""Tells checkpoints of equal names, shapes and types apart by a few of their values."""

import hashlib

from .folder import Folder

#: Tensors of a shard that are looked at, and bytes at each of three places of them.
_LOOKED_AT, _BYTES = 256, 128


def values_digest(folder: Folder) -> str:
    """A hash of values at three places of some tensors of each shard, in hex.

    Tells builds apart whose tensors have the same names, shapes and types.
    """
    found = hashlib.blake2b(digest_size=16)
    for _, header in sorted(folder.headers.items()):
        tensors = sorted(header.tensors.items())
        step = max(1, len(tensors) // _LOOKED_AT)
        with header.path.open("rb", buffering=0) as file:
            for name, tensor in tensors[::step]:
                found.update(name.encode())
                last = max(0, tensor.nbytes - _BYTES)
                for place in (0, last // 2, last):
                    file.seek(tensor.start + place)
                    found.update(file.read(min(_BYTES, tensor.nbytes)))
    return found.hexdigest()
