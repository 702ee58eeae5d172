"""ProbeTable: how far the answers move when one part of a checkpoint is changed.

Errors inside a layer say little about the next token: some parts of a model forgive what
others do not. A probe changes one part of the whole model (a class of matrices to fewer
bits, the experts of a layer to the low bank, half of them dropped), runs text through
it, and compares every next-token distribution with the unchanged model's.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from ..build.sealed_npz import digest_of, read_sealed, write_sealed
from ..errors import PlanError

KIND, VERSION = "table of probes", 1

#: Name of the file in the folder of the calibration.
FILE_NAME = "probes.npz"

_REMEDY = "Run `kimi-k3 damage SOURCE CALIBRATION --restart`."


@dataclass(frozen=True, eq=False)
class ProbeTable:
    """KL(source ‖ changed source) of next tokens, nats, mean by corpus (K corpora).

    Attributes:
        corpora: K names. tokens: (K,) of the text that was probed with.
        shares: (K,) what share of the calibration each corpus was.
        layers: (L,) MoE layers, 0-based.
        classes: C classes of matrices. bits: (B,) that they were tried at.
        class_divergence: (K, C, B), NaN where the class has no such width.
        low_bits: (F,) widths of the low bank.
        low_divergence: (K, F, L), all experts of a layer in the low bank; NaN for layers
            that were not tried.
        dropped: (L, E) bool, the experts that were dropped together.
        drop_divergence: (K, L), the router choosing among the others.
        source: fingerprints of the checkpoint. samples: fingerprint of the samples.
        settings: what else the figures depend on; plain JSON values.
    """

    corpora: tuple[str, ...]
    tokens: np.ndarray
    shares: np.ndarray
    layers: np.ndarray
    classes: tuple[str, ...]
    bits: np.ndarray
    class_divergence: np.ndarray
    low_bits: np.ndarray
    low_divergence: np.ndarray
    dropped: np.ndarray
    drop_divergence: np.ndarray
    source: Mapping[str, Any]
    samples: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        corpora, layers = len(self.corpora), len(self.layers)
        wanted = {
            "tokens": (corpora,),
            "shares": (corpora,),
            "class_divergence": (corpora, len(self.classes), len(self.bits)),
            "low_divergence": (corpora, len(self.low_bits), layers),
            "drop_divergence": (corpora, layers),
        }
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array.shape != shape:
                raise PlanError(f"{name} is {array.shape}, wanted {shape}. {_REMEDY}")
            whole = name not in ("class_divergence", "low_divergence")
            if np.isinf(array).any() or (whole and np.isnan(array).any()):
                raise PlanError(f"{name} holds what is no number. {_REMEDY}")
        if np.isnan(self.low_divergence).all():
            raise PlanError(f"no layer was tried in a low bank. {_REMEDY}")
        # Differences that rounding makes may fall below 0 by as much.
        for name in ("low_divergence", "drop_divergence", "class_divergence"):
            if (getattr(self, name) < -1e-4).any():
                raise PlanError(f"{name} is below 0, which none can be. {_REMEDY}")

    @property
    def digest(self) -> str:
        return digest_of(self._arrays())

    def mean(
        self, divergence: np.ndarray, weights: Mapping[str, float] | None
    ) -> np.ndarray:
        """``divergence`` (K, …) over corpora.

        Args:
            weights: corpus → share of the text, as ``SaliencyTable.shares`` takes them;
                None: as the calibration had them.

        Raises PlanError for a corpus that has a weight but was not probed.
        """
        given = self.shares
        if weights is not None:
            given = np.array([float(weights.get(name, 0)) for name in self.corpora])
        if not given.sum() > 0:
            raise PlanError(
                f"no probed corpus has a weight; there are {', '.join(self.corpora)}."
            )
        for name, share, tokens in zip(self.corpora, given, self.tokens, strict=True):
            if share > 0 and not tokens:
                raise PlanError(
                    f"no text of corpus {name} was probed, but it has a weight. Run "
                    "`kimi-k3 damage` with more --probe-tokens and --restart, or plan "
                    "with --probes off."
                )
        found = np.maximum(divergence, 0.0)
        return np.tensordot(given / given.sum(), found, axes=1)

    def save(self, path: str | Path) -> Path:
        """Write the sealed file ``path``; where."""
        write_sealed(path, KIND, VERSION, self._arrays())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read and check a file of :meth:`save`; raises PlanError naming it."""
        arrays: dict[str, Any] = dict(
            read_sealed(path, KIND, VERSION, PlanError, _REMEDY)
        )
        try:
            arrays["corpora"] = tuple(json.loads(str(arrays["corpora"])))
            arrays["classes"] = tuple(json.loads(str(arrays["classes"])))
            arrays["source"] = json.loads(str(arrays["source"]))
            arrays["settings"] = json.loads(str(arrays["settings"]))
            arrays["samples"] = str(arrays["samples"])
            return cls(**arrays)
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"{path} does not hold what a {KIND} holds: {error}. {_REMEDY}"
            ) from error

    def _arrays(self) -> dict[str, np.ndarray]:
        found = dict(vars(self))
        for name in ("corpora", "classes", "source", "settings"):
            found[name] = np.array(json.dumps(found[name], sort_keys=True))
        return {name: np.asarray(value) for name, value in found.items()}
