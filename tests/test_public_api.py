"""What ``import kimi_k3`` offers, and that it brings nothing heavy along."""

import importlib
import pkgutil

import pytest
from fresh_python import run_python

import kimi_k3


def test_importing_changes_nothing():
    done = run_python(
        [
            "-c",
            "import sys; finders, modules = list(sys.meta_path), set(sys.modules)\n"
            "import kimi_k3, kimi_k3.errors\n"
            "assert sys.meta_path == finders\n"
            "print(*sorted(set(sys.modules) - modules))",
        ]
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"kimi_k3", "kimi_k3.errors"}


@pytest.mark.parametrize("name", kimi_k3.__all__)
def test_every_public_name_is_there(name: str):
    assert getattr(kimi_k3, name) is not None
    assert name in dir(kimi_k3)


def test_public_names():
    assert kimi_k3.__all__ == [
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
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        kimi_k3.lode  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_models_are_importable_by_name():
    from kimi_k3.models import Model, ModelArgs

    assert Model.__module__ == "kimi_k3.models.kimi_k3"
    assert ModelArgs.__name__ == "ModelArgs"


def test_every_module_imports():
    names = [
        module.name
        for module in pkgutil.walk_packages(kimi_k3.__path__, "kimi_k3.")
        if not module.name.endswith("__main__")
    ]
    assert len(names) > 20
    for name in names:
        assert importlib.import_module(name).__doc__, f"{name} has no docstring"


def test_every_error_is_one_of_ours():
    from kimi_k3 import errors

    raised = [e for e in vars(errors).values() if isinstance(e, type)]
    assert all(
        issubclass(e, errors.KimiK3Error | UserWarning) and e.__doc__ for e in raised
    )
    assert issubclass(errors.KimiK3Error, ValueError)
