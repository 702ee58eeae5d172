"""JSON files that know when they are damaged: a kind, a version and a digest."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ..conversion.durable_files import write_durably
from ..errors import EvaluationError


def write_json(path: Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Write ``content`` to ``path``, durably, whole or not at all."""
    content = {"kind": kind, "version": version, **content}
    content["digest"] = _digest(content)
    write_durably(path, (json.dumps(content, indent=1) + "\n").encode())


def read_json(path: Path, kind: str, version: int, remedy: str) -> dict[str, Any]:
    """The content of :func:`write_json`, without kind, version and digest.

    Raises EvaluationError, which ends with ``remedy``, for anything else.
    """
    try:
        content = json.loads(path.read_text("utf-8"))
        seal = content.pop("digest")
        whole = seal == _digest(content)
        found = content.pop("kind"), content.pop("version")
    except FileNotFoundError:
        raise EvaluationError(
            f"{path} is not there; {kind} was expected. {remedy}"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EvaluationError(
            f"{path} is damaged, or not {kind}: {error}. {remedy}"
        ) from error
    if found != (kind, version):
        raise EvaluationError(
            f"{path} is {found[0]} of version {found[1]}, wanted {kind} of version "
            f"{version}. {remedy}"
        )
    if not whole:
        raise EvaluationError(f"{path} was changed after it was written. {remedy}")
    return content


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
