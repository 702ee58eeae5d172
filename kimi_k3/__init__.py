"""Run, prune and judge Kimi K3 on Apple's MLX.

Importing this package changes nothing and does not import mlx: mlx-lm finds the model
class through an import finder that the installation adds (:mod:`kimi_k3.registration`).
"""

# Importing typing would cost more than the rest of a Python start with this package.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from .answers.generation import generation
    from .build.calibrate import calibrate
    from .build.verify import verify
    from .conversion.convert import convert
    from .evaluation.evaluate import evaluate, make_teacher
    from .loading import load
    from .planning.make_plan import plan
    from .planning.measure import damage
    from .registration import register
    from .tokenizer.answer import read_answer

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "calibrate",
    "convert",
    "damage",
    "evaluate",
    "generation",
    "load",
    "make_teacher",
    "plan",
    "read_answer",
    "register",
    "verify",
]

#: Public name → the module that it comes from, imported when it is first asked for.
_HOMES = {
    "calibrate": ".build.calibrate",
    "convert": ".conversion.convert",
    "damage": ".planning.measure",
    "evaluate": ".evaluation.evaluate",
    "generation": ".answers.generation",
    "load": ".loading",
    "make_teacher": ".evaluation.evaluate",
    "plan": ".planning.make_plan",
    "read_answer": ".tokenizer.answer",
    "register": ".registration",
    "verify": ".build.verify",
}


def __getattr__(name: str) -> object:
    """What ``__all__`` offers."""
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
