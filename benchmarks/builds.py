"""Load every kind of build with our class and with mlx-lm's own, and compare logits.

    python benchmarks/builds.py DATA --out benchmarks/results/builds.json
    python benchmarks/builds.py --readme           # print the table of the README

DATA holds ``formats/`` and ``golden/`` as tests/data does. Errors are
max|a - b| / max|expected| of a forward pass in float32: for the source format against
Moonshot's own code, for builds against dense logits made from them by neither loader.
The last line of the output is one JSON document.
"""

import argparse
import json
import platform
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "builds.json"

#: What each folder stands for, in the order of the table.
KINDS = {
    "golden/A": "Moonshot's source format",
    "formats/A-lm-saved": "mlx-lm: saved from the source, experts mxfp4, nothing rounded",
    "formats/A-lm-uniform": "mlx-lm: pruned to one expert count",
    "formats/D-lm-q8": "mlx-lm: `mlx_lm.convert -q`, non-experts 8-bit",
    "formats/A-lm-uvmax-like": "mlx-lm: experts affine 2-bit, others 4/6/8, router 8",
    "formats/A-vlm-saved": "mlx-vlm: converted with its vision tower",
    "formats/A-pn-mxfp4": "pipenetwork: no prefix, experts mxfp4",
    "formats/D-pn-mxfp4-q8": "pipenetwork: non-experts and router 8-bit",
    "formats/D-pn-2bit": "pipenetwork: experts affine 2-bit",
    "formats/D-pn-uniform-q8": "pipenetwork: pruned to one expert count",
    "formats/A-pn-global": "pipenetwork: another expert count in each layer",
    "formats/A-pn-graded": "pipenetwork: two banks, mxfp4 and 2-bit",
    "formats/D-pn-graded-q8": "pipenetwork: two banks, non-experts 8-bit",
}


def error_of(folder: Path, classes: Any) -> float | str:
    """Relative error of a class on a build, or the first words of its refusal."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    in_source_format = folder.parent.name == "golden"
    file = "golden_text" if in_source_format else "expected_logits"
    expected = mx.load(str(folder / f"{file}.safetensors"))
    try:
        model, _ = load_model(folder, get_model_classes=lambda config: classes)
    except ValueError as refusal:
        return " ".join(str(refusal).split())[:60]
    model.set_dtype(mx.float32)
    want = expected["logits"]
    error = mx.abs(model(expected["input_ids"]) - want).max() / mx.abs(want).max()
    return float(f"{error.item():.1e}")


def measure(data: Path) -> dict[str, Any]:
    from kimi_k3.models import Model, ModelArgs
    from kimi_k3.registration import load_upstream

    host = load_upstream("mlx_lm.models.kimi_k3")
    rows = {}
    for name in KINDS:
        folder = data / name
        rows[name] = {
            "kimi-k3-mlx": error_of(folder, (Model, ModelArgs)),
            "mlx-lm": error_of(folder, (host.Model, host.ModelArgs)),
        }
        print(name, rows[name])
    return {
        "benchmark": "builds",
        "command": "python benchmarks/builds.py DATA",
        "machine": f"{platform.system()} {platform.machine()}, CPU",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "kimi-k3-mlx")},
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The README's table of a result."""

    def cell(value: float | str) -> str:
        return f"{value:.0e}" if isinstance(value, float) else "refuses it"

    lines = [
        f"| build | kimi-k3-mlx | mlx-lm {result['versions']['mlx-lm']} |",
        "|---|---|---|",
    ]
    for name, kind in KINDS.items():
        row = result["rows"][name]
        lines.append(f"| {kind} | {cell(row['kimi-k3-mlx'])} | {cell(row['mlx-lm'])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "data", type=Path, nargs="?", help="folder with formats/, golden/"
    )
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--readme", action="store_true", help="print the table")
    options = parser.parse_args()
    if options.readme:
        print(table(json.loads(RESULTS.read_text())))
        return
    if options.data is None:
        parser.error("DATA is missing")
    warnings.simplefilter("ignore")
    result = measure(options.data)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
