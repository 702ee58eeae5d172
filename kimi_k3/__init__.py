"""Run, prune and judge Kimi K3 on Apple's MLX.

Importing this package changes nothing and does not import mlx: mlx-lm finds the model
class through an import finder that the installation adds (:mod:`kimi_k3.registration`).
"""

# Importing typing would cost more than the rest of a Python start with this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .build.calibrate import calibrate
    from .conversion.convert import convert
    from .build.verify import verify
    from .loading import load
    from .registration import register

__version__ = "0.1.0"

__all__ = ["__version__", "calibrate", "convert", "load", "register", "verify"]


def __getattr__(name: str) -> object:
    """Import what ``__all__`` offers when it is first asked for."""
    if name == "calibrate":
        from .build.calibrate import calibrate

        return calibrate
    if name == "convert":
        from .conversion.convert import convert

        return convert
    if name == "load":
        from .loading import load

        return load
    if name == "register":
        from .registration import register

        return register
    if name == "verify":
        from .build.verify import verify

        return verify
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
