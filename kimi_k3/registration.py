"""How mlx-lm and mlx-vlm find our classes: one lazy import finder.

A start-up file of the installation (``kimi_k3_mlx.pth``; from Python 3.15 on
``kimi_k3_mlx.start``) calls :func:`install_at_startup` in every Python process. The
finder answers for the names of :data:`ANSWERS` and no others, and only when one of them
is imported does anything else happen. ``KIMI_K3_MLX=off`` in the environment leaves it
out. Every Python start pays for this file, so it imports only what is loaded already.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType

#: Module of a host library -> our module that answers for it, once that module exists.
ANSWERS = {
    "mlx_lm.models.kimi_k3": "kimi_k3.models.kimi_k3",
    "mlx_lm.tool_parsers.kimi_k3": "kimi_k3.tokenizer.tool_parser",
    "mlx_lm.chat_templates.kimi_k3": "kimi_k3.tokenizer.chat_template",
    "mlx_vlm.models.kimi_k3": "kimi_k3.models.multimodal",
}

#: The oldest release of each host that this package works with.
OLDEST_HOST = {"mlx_lm": (0, 32, 2), "mlx_vlm": (0, 7, 10)}

SWITCH = "KIMI_K3_MLX"

_PACKAGE_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


class Finder:
    """Import finder for the names of :data:`ANSWERS`.

    ``installed_by`` says who put it in place, for ``kimi-k3 doctor``.
    """

    def __init__(self, installed_by: str) -> None:
        self.installed_by = installed_by

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> "ModuleSpec | None":
        file = our_file(name)
        if file is None:
            return None
        from importlib.util import spec_from_file_location

        # A host's package keeps its submodules: only what it exports is ours.
        upstream = _upstream_spec(name)
        folders = upstream.submodule_search_locations if upstream else None
        return spec_from_file_location(
            name,
            file,
            loader=_Loader(),  # pyright: ignore[reportArgumentType]
            submodule_search_locations=folders,
        )


class _Loader:
    """Fills a host's module with the names of ours."""

    def create_module(self, spec: "ModuleSpec") -> None:
        return None

    def exec_module(self, module: "ModuleType") -> None:
        from importlib import import_module

        check_host(module.__name__.partition(".")[0])
        try:
            ours = import_module(ANSWERS[module.__name__])
        except ImportError as error:
            raise _import_failure(module.__name__, error) from error
        for name, value in vars(ours).items():
            if not (name.startswith("__") and name.endswith("__")):
                setattr(module, name, value)
        module.__doc__ = ours.__doc__


def install_at_startup() -> None:
    """What the start-up file calls."""
    install("start-up file")


def install(installed_by: str) -> bool:
    """Put one finder first on ``sys.meta_path``; False if the switch is off."""
    if switched_off():
        return False
    found = [finder for finder in sys.meta_path if isinstance(finder, Finder)]
    finder = found[0] if found else Finder(installed_by)
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, Finder)]
    sys.meta_path.insert(0, finder)  # pyright: ignore[reportArgumentType]
    return True


def register() -> bool:
    """Let mlx-lm and mlx-vlm in this process use our classes for ``kimi_k3``.

    Needed only where Python ignores start-up files; calling it again is harmless.
    Returns False, and changes nothing, if ``KIMI_K3_MLX=off`` is set. Raises
    :class:`~kimi_k3.errors.RegistrationError` if mlx-lm is missing or too old, or if
    the host's own class is already in use.
    """
    from .errors import RegistrationError

    if switched_off():
        return False
    check_host("mlx_lm")
    for name in ANSWERS:
        module = sys.modules.get(name)
        if module is not None and our_file(name) and not is_ours(module.__file__):
            raise RegistrationError(
                f"{name} was already imported from {module.__file__}, so its class "
                "is in use. Call kimi_k3.register() before the first model is loaded."
            )
    return install("kimi_k3.register()")


def switched_off() -> bool:
    """Whether the environment says that hosts keep their own classes."""
    return os.environ.get(SWITCH, "").lower() in ("off", "0", "false", "no")


def our_file(name: str) -> str | None:
    """The file that answers for the host module ``name``, or None."""
    ours = ANSWERS.get(name)
    if ours is None:
        return None
    file = os.path.join(_PACKAGE_FOLDER, *ours.split(".")[1:]) + ".py"  # noqa: PTH118
    return file if os.path.isfile(file) else None  # noqa: PTH113


def is_ours(file: str | None) -> bool:
    """Whether ``file`` lies in this package: how to tell whose class one holds."""
    if file is None:
        return False
    return os.path.abspath(file).startswith(_PACKAGE_FOLDER + os.sep)  # noqa: PTH100


def host_version(host: str) -> str | None:
    """Version of ``mlx_lm`` or ``mlx_vlm``; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(_pip_name(host))
    except PackageNotFoundError:
        return getattr(sys.modules.get(host), "__version__", None)


def check_host(host: str) -> None:
    """Raise RegistrationError unless ``host`` is installed and new enough."""
    import re

    from .errors import RegistrationError

    name = _pip_name(host)
    wanted = ".".join(map(str, OLDEST_HOST[host]))
    found = host_version(host)
    if found is None:
        raise RegistrationError(
            f"{name} is not installed; kimi-k3-mlx needs {name} {wanted} or newer: "
            f'pip install "{name}>={wanted}"'
        )
    numbers = re.match(r"\d+(\.\d+)*", found)
    parts = tuple(map(int, numbers[0].split("."))) if numbers else ()
    if parts < OLDEST_HOST[host]:
        raise RegistrationError(
            f"{name} {found} is too old for kimi-k3-mlx, which needs {wanted} or "
            f'newer: pip install -U "{name}>={wanted}", or set {SWITCH}=off to use the '
            "host's own class."
        )


def load_upstream(name: str) -> "ModuleType":
    """The host's own module ``name``, loaded beside ours under another name.

    ``load_upstream("mlx_lm.models.kimi_k3").Model`` is mlx-lm's class whatever our
    finder answers. Raises RegistrationError if the host has no such module.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    from .errors import RegistrationError

    package, _, last = name.rpartition(".")
    alias = f"{package}.upstream_{last}"
    if alias in sys.modules:
        return sys.modules[alias]
    found = _upstream_spec(name)
    spec = found and spec_from_file_location(
        alias,
        found.origin,
        submodule_search_locations=found.submodule_search_locations,
    )
    if spec is None or spec.loader is None:
        raise RegistrationError(
            f"This {_pip_name(name.partition('.')[0])} has no module {name} of its own."
        )
    module = module_from_spec(spec)
    sys.modules[alias] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def _import_failure(name: str, error: ImportError) -> Exception:
    """A host would only say that the model type is not supported."""
    from .errors import RegistrationError

    if (error.name or "").partition(".")[0] == "kimi_k3":
        return RegistrationError(
            f"{name}: kimi-k3-mlx is damaged ({error}); install it again."
        )
    host = name.partition(".")[0]
    return RegistrationError(
        f"{name}: {_pip_name(host)} {host_version(host)} or what it uses lacks something "
        f"that kimi-k3-mlx needs: {error}. Update both, or set {SWITCH}=off to use the "
        "host's own class."
    )


def _upstream_spec(name: str) -> "ModuleSpec | None":
    """What Python finds for ``name`` with our finder left out."""
    from importlib import import_module

    folders = import_module(name.rpartition(".")[0]).__path__
    for finder in sys.meta_path:
        if isinstance(finder, Finder):
            continue
        try:
            spec = finder.find_spec(name, folders)
        except ImportError:  # how a finder says that nobody may import this
            return None
        if spec is not None:
            return spec
    return None


def _pip_name(host: str) -> str:
    return host.replace("_", "-")
