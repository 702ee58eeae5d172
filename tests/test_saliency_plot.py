"""Pictures of a saliency report: every one is drawn, and no warning with it."""

import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saliency_tables import small_table

from kimi_k3.build.saliency import SaliencyTable
from kimi_k3.build.saliency_plot import PICTURES, draw
from kimi_k3.build.saliency_report import saliency_report
from kimi_k3.cli import main
from kimi_k3.errors import MissingPackageError


def pixels(file: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:])
    return width, height


def test_the_verb_draws_every_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A name in a script that the font lacks is no reason to complain.
    small_table(corpora=("code", "中文")).save(tmp_path)
    folder = tmp_path / "new" / "pictures"
    assert main(["saliency", str(tmp_path), "--plot", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("22 experts")
    files = {Path(line.removeprefix("drawn: ")) for line in err.splitlines()}
    assert files == set(folder.iterdir())
    assert {file.stem for file in files} == set(PICTURES)
    assert all(pixels(file) == (960, 800) for file in files)


def test_one_corpus_overlaps_with_none(tmp_path: Path) -> None:
    table = small_table()
    alone = SaliencyTable.from_layers(
        {
            layer: {
                name: array[:1, at, : table.experts[at]]
                for name, array in table.statistics.items()
            }
            for at, layer in enumerate(table.layers.tolist())
        },
        corpora=["code"],
        tokens=[40],
        top_k=2,
        source=table.source,
        samples=table.samples,
    )
    files = draw(alone, saliency_report(alone), tmp_path)
    assert {file.stem for file in files} == set(PICTURES) - {"overlap"}


@pytest.mark.parametrize(
    "names",
    [
        ("$\\frac{$", "a$b"),
        ("a/b 'c' \"d\"\n", "<b>&"),
        ("x" * 300, "y" * 200),
    ],
)
def test_any_name_can_be_drawn(names: tuple[str, str], tmp_path: Path) -> None:
    table = small_table(corpora=names)
    assert len(draw(table, saliency_report(table), tmp_path)) == len(PICTURES)


def test_many_corpora_are_drawn_without_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair's figure in a picture of thousands takes hours and cannot be read."""
    from matplotlib.axes import Axes

    few, written, write = small_table(), [], Axes.text

    def text(axes: Axes, *arguments: Any, **settings: Any) -> Any:
        written.append(arguments[2])
        return write(axes, *arguments, **settings)

    monkeypatch.setattr(Axes, "text", text)
    draw(few, saliency_report(few), tmp_path)
    assert len([each for each in written if each.endswith("%")]) == 4
    written.clear()
    several = replace(
        few,
        corpora=tuple(map(str, range(50))),
        tokens=np.tile(few.tokens, 25),
        **{name: np.tile(a, (25, 1, 1)) for name, a in few.statistics.items()},
    )
    draw(several, saliency_report(several), tmp_path)
    assert not written


def test_a_file_where_pictures_should_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small_table().save(tmp_path / "saliency.npz")
    assert main(["saliency", str(path), "--plot", str(path)]) == 2
    assert (
        "saliency.npz cannot be made a folder: File exists" in capsys.readouterr().err
    )
    SaliencyTable.load(path)


def test_without_matplotlib(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    table = small_table()
    table.save(tmp_path)
    with pytest.raises(MissingPackageError, match=r"install 'kimi-k3-mlx\[plot\]'"):
        draw(table, saliency_report(table), tmp_path / "pictures")
    assert main(["saliency", str(tmp_path), "--plot", str(tmp_path / "pictures")]) == 2
    assert "matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()
    assert main(["saliency", str(tmp_path)]) == 0  # needed for pictures only
