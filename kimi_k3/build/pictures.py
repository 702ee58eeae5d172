"""How pictures are drawn: colours, type sizes, files. Readable at the width of a phone.

Colours are those of Okabe and Ito, and viridis, which colour-blind readers can tell
apart; no meaning rests on colour alone.
"""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import KimiK3Error, MissingPackageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#767676"
AMBER, PALE = "#E69F00", "#E4E4E4"

#: 960 pixels wide; text of 11 points is 12 pixels high on a phone of 390.
SIZE, DOTS_PER_INCH = (4.8, 4.0), 200
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 11.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 10,
}

#: Characters of a corpus' name that are drawn.
NAME_LENGTH = 24


def draw_pictures(
    pictures: Mapping[str, "Callable[[Figure], None]"],
    folder: str | Path,
    error: type[KimiK3Error],
) -> list[Path]:
    """Write ``folder/NAME.png`` for each name and what draws it; the files.

    Raises MissingPackageError without matplotlib, ``error`` if there can be no folder.
    """
    require_matplotlib()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise error(
            f"{folder} cannot be made a folder: {problem.strerror}. Name another one for "
            "the pictures."
        ) from problem
    files = []
    for name, picture in pictures.items():
        with mpl.rc_context(STYLE), warnings.catch_warnings():
            # A corpus may be named in a script that the font does not have.
            warnings.filterwarnings("ignore", "Glyph .* missing")
            figure = Figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
            picture(figure)
            files.append(folder / f"{name}.png")
            figure.savefig(files[-1])
    return files


def require_matplotlib() -> None:
    """Raise MissingPackageError, with what to run, if nothing can be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as missing:
        raise MissingPackageError(
            "drawing needs matplotlib, which is not installed. "
            "Run: pip install 'kimi-k3-mlx[plot]'"
        ) from missing


def label(name: str) -> str:
    """A corpus' name, cut to fit, in which a dollar sign begins no formula."""
    short = name if len(name) <= NAME_LENGTH else f"{name[: NAME_LENGTH - 1]}…"
    return short.replace("$", r"\$")


def layer_axis(axes: "Axes") -> None:
    """Whole numbers of decoder layers, across."""
    locator: Any = axes.xaxis.get_major_locator()
    locator.set_params(integer=True)
    axes.set_xlabel("decoder layer")
