"""The import finder: whose module answers, what it costs, how it is switched off."""

import importlib
import importlib.metadata
import inspect
import os
import re
import sys
import textwrap
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import pytest
from fresh_python import run_python

import kimi_k3
from kimi_k3 import registration
from kimi_k3.errors import RegistrationError

OURS = Path(kimi_k3.__file__).parent
NAME = "mlx_lm.models.kimi_k3"


def python(code: str, *options: str, **environment: str) -> str:
    """What a new Python prints for ``code``."""
    done = run_python([*options, "-c", textwrap.dedent(code)], environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def without_startup_file(code: str, **environment: str) -> str:
    """As :func:`python`, in a Python that reads no start-up files."""
    paths = f"import sys; sys.path[:0] = {[str(OURS.parent), *sys.path]!r}\n"
    return python(paths + textwrap.dedent(code), "-S", **environment)


@pytest.fixture
def finders():
    """Put ``sys.meta_path`` back afterwards."""
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


def test_the_start_up_file_is_installed():
    """If this fails, install the package again: pip install -e ."""
    by = python(
        """
        import sys
        print(type(sys.meta_path[0]).__module__, sys.meta_path[0].installed_by)
        """
    )
    assert by == "kimi_k3.registration start-up file"


def test_mlx_lm_gets_our_class():
    from mlx_lm.utils import _get_classes

    from kimi_k3.models import Model, ModelArgs

    assert _get_classes({"model_type": "kimi_k3"}) == (Model, ModelArgs)
    assert registration.is_ours(inspect.getfile(Model))


def test_hosts_module_has_the_names_of_ours():
    theirs, ours = importlib.import_module(NAME), registration.ANSWERS[NAME]
    exported = {k for k in vars(importlib.import_module(ours)) if not k.startswith("_")}
    assert {"Model", "ModelArgs"} <= exported
    for name in exported:
        assert getattr(theirs, name) is getattr(importlib.import_module(ours), name)


def test_upstream_class_loads_beside_ours():
    upstream = registration.load_upstream(NAME)
    file = Path(inspect.getfile(upstream.Model))
    assert file.parts[-3:] == ("mlx_lm", "models", "kimi_k3.py")
    assert not registration.is_ours(str(file))
    assert registration.load_upstream(NAME) is upstream
    assert importlib.import_module(NAME).Model is not upstream.Model


def test_upstream_module_that_is_not_there():
    with pytest.raises(RegistrationError, match="no module mlx_lm.models.kimi_k9"):
        registration.load_upstream("mlx_lm.models.kimi_k9")


@pytest.mark.parametrize("name", registration.ANSWERS)
def test_a_name_is_answered_only_with_code(name: str):
    spec = registration.Finder("test").find_spec(name)
    module = registration.ANSWERS[name].removeprefix("kimi_k3.").replace(".", "/")
    exists = (OURS / f"{module}.py").exists()
    assert (spec is not None) == exists == bool(registration.our_file(name))


@pytest.mark.parametrize(
    "name", ["mlx_lm", "mlx_lm.models", "mlx_lm.models.kimi_linear", "json", "kimi_k3"]
)
def test_other_names_are_left_alone(name: str):
    assert registration.Finder("test").find_spec(name) is None


def test_a_hosts_package_keeps_its_submodules():
    files = python(
        """
        from kimi_k3 import registration
        registration.ANSWERS["mlx_vlm.models.kimi_k3"] = "kimi_k3.errors"
        import inspect, mlx_vlm.models.kimi_k3 as package
        import mlx_vlm.models.kimi_k3.vision as vision
        print(package.KimiK3Error.__name__, package.__file__, vision.__file__)
        upstream = registration.load_upstream("mlx_vlm.models.kimi_k3")
        print(inspect.getfile(upstream.Model))
        """
    )
    name, ours, vision, upstream = files.split()
    assert name == "KimiK3Error"
    assert registration.is_ours(ours)
    assert vision.endswith("mlx_vlm/models/kimi_k3/vision.py")
    assert upstream.endswith("mlx_vlm/models/kimi_k3/kimi_k3.py")


def test_switch_off_leaves_mlx_lms_class():
    finder, file, registered = python(
        """
        import inspect, sys
        print(any(type(f).__name__ == "Finder" for f in sys.meta_path))
        from mlx_lm.models.kimi_k3 import Model
        print(inspect.getfile(Model))
        import kimi_k3
        print(kimi_k3.register())
        """,
        KIMI_K3_MLX="off",
    ).split()
    assert finder == registered == "False"
    assert file.endswith("mlx_lm/models/kimi_k3.py")


@pytest.mark.parametrize(
    ("value", "off"),
    [("off", True), ("OFF", True), ("0", True), ("on", False), ("", False)],
)
def test_values_of_the_switch(value: str, off: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KIMI_K3_MLX", value)
    assert registration.switched_off() == off


def test_start_up_costs_little(tmp_path: Path):
    """Python starts with two small modules more, in under a millisecond."""
    compiled = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    timing = """
        import os, sys, time
        before, times = set(sys.modules), []
        for attempt in range(30):
            start = time.perf_counter()
            import kimi_k3.registration
            kimi_k3.registration.install_at_startup()
            times.append(time.perf_counter() - start)
            added = set(sys.modules) - before
            for name in added:
                del sys.modules[name]
            sys.meta_path.pop(0)
        print(*sorted(added), min(times) * 1e3)
        """
    *modules, milliseconds = without_startup_file(timing, **compiled).split()
    assert modules == ["kimi_k3", "kimi_k3.registration"]
    assert float(milliseconds) < 1


def test_start_files_of_both_kinds_name_the_same_function(
    monkeypatch: pytest.MonkeyPatch, finders: None
):
    from pkgutil import resolve_name

    folder = Path(__file__).parent.parent / "packaging"
    (entry_point,) = (folder / "kimi_k3_mlx.start").read_text().split()
    assert resolve_name(entry_point) is registration.install_at_startup
    (line,) = (folder / "kimi_k3_mlx.pth").read_text().splitlines()
    assert line.startswith("import ")  # all other lines would be paths
    sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "Finder"]
    exec(line)
    assert isinstance(sys.meta_path[0], registration.Finder)


def test_register_once_and_first(finders: None):
    sys.meta_path.insert(0, PathFinder())
    assert kimi_k3.register()
    assert kimi_k3.register()
    found = [isinstance(finder, registration.Finder) for finder in sys.meta_path]
    assert found[0]
    assert sum(found) == 1


def test_register_where_start_up_files_are_ignored():
    file, by = without_startup_file(
        """
        import kimi_k3
        assert not any(type(f).__name__ == "Finder" for f in sys.meta_path)
        assert kimi_k3.register()
        import inspect, mlx_lm.utils
        model, _ = mlx_lm.utils._get_classes({"model_type": "kimi_k3"})
        print(inspect.getfile(model), sys.meta_path[0].installed_by)
        """
    ).split()
    assert registration.is_ours(file)
    assert by == "kimi_k3.register()"


def test_register_after_the_host_loaded_its_own(
    monkeypatch: pytest.MonkeyPatch, finders: None
):
    own = ModuleType(NAME)
    own.__file__ = "/somewhere/mlx_lm/models/kimi_k3.py"
    monkeypatch.setitem(sys.modules, NAME, own)
    with pytest.raises(RegistrationError, match="already imported from /somewhere"):
        kimi_k3.register()


@pytest.mark.parametrize(
    ("version", "accepted"),
    [
        ("0.32.2", True),
        ("0.33", True),
        ("1.0.0.dev1+local", True),
        ("0.32.1", False),
        ("0.4", False),
    ],
)
def test_host_versions(
    version: str, accepted: bool, monkeypatch: pytest.MonkeyPatch, finders: None
):
    monkeypatch.setattr(registration, "host_version", lambda host: version)
    monkeypatch.delitem(sys.modules, NAME)
    if accepted:
        assert registration.is_ours(importlib.import_module(NAME).__file__)
        return
    message = f"mlx-lm {version} is too old .* 0.32.2 or newer: pip install -U"
    with pytest.raises(RegistrationError, match=message):
        kimi_k3.register()
    with pytest.raises(RegistrationError, match=message):
        importlib.import_module(NAME)


def test_host_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registration, "host_version", lambda host: None)
    with pytest.raises(RegistrationError, match="mlx-lm is not installed"):
        kimi_k3.register()


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (
            "mlx_lm.models.cache.ArraysCache",
            "mlx-lm 0.* or what it uses lacks something",
        ),
        ("kimi_k3.models", "kimi-k3-mlx is damaged"),
    ],
)
def test_a_piece_that_is_missing(missing: str, message: str):
    """It is told in one line, not as an unsupported model type."""
    answer = python(
        f"""
        import sys, mlx_lm.models.cache
        sys.modules["kimi_k3.models"] = None
        if {missing!r} != "kimi_k3.models":
            del sys.modules["kimi_k3.models"], {missing}
        try:
            mlx_lm.utils._get_classes({{"model_type": "kimi_k3"}})
        except ValueError as error:
            print(type(error).__name__, error)
        """
    )
    assert re.match(f"RegistrationError .*{message}", answer)
    assert answer.count("\n") == 0


def test_required_versions_have_one_value():
    """What is checked at run time is what pip is told."""
    required = importlib.metadata.requires("kimi-k3-mlx") or []
    for host, oldest in registration.OLDEST_HOST.items():
        name = host.replace("_", "-")
        asked = {m[1] for r in required if (m := re.match(rf"{name}>=([\d.]+)", r))}
        assert asked == {".".join(map(str, oldest))}


def test_no_function_of_a_host_is_ours():
    foreign = python(
        """
        import sys, types, mlx_lm.server, mlx_lm.lora, mlx_lm.models.kimi_k3
        from kimi_k3.registration import is_ours
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] not in ("mlx_lm", "mlx", "transformers"):
                continue
            if name == "mlx_lm.models.kimi_k3":
                continue
            for value in list(vars(module).values()):
                code = getattr(value, "__code__", None)
                if isinstance(value, types.FunctionType) and is_ours(code.co_filename):
                    print(name, value)
        """
    )
    assert foreign == ""
    assert os.environ.get("KIMI_K3_MLX") is None
