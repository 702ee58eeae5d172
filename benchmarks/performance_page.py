"""Put the figures of the results files into docs/performance.md.

    python benchmarks/performance_page.py

Rewrites what stands between the page's markers, ``<!-- name -->`` and ``<!-- /name -->``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import decode
import launch_census
import long_prompt
from page_tables import with_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


def experts_table(result: dict[str, Any]) -> str:
    """Ratios by number of tokens; the ratio of processor time in brackets."""
    names = {
        "choosing_a_bank": "two banks : the same pairs, each bank alone",
        "second_bank": "two mxfp4 banks : one",
        "mlx_lm": "mlx-lm : ours",
    }
    tokens = list(result["results"]["mlx_lm"])
    lines = [
        "| time | " + " | ".join(f"{n} tokens" for n in tokens) + " |",
        "|---" * (len(tokens) + 1) + "|",
    ]
    for name, words in names.items():
        found = result["results"][name]
        cells = [
            f"{found[n]['ratio']:.2f} ({found[n]['cpu_ratio']:.2f})" for n in tokens
        ]
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def top_p_table(result: dict[str, Any]) -> str:
    """Experts run and divergence by share."""
    rows = result["rows"]
    return "\n".join(
        [
            "| `expert_top_p` | " + " | ".join(str(row["p"]) for row in rows) + " |",
            "|---" * (len(rows) + 1) + "|",
            "| experts | " + " | ".join(f"{row['experts']:.2f}" for row in rows) + " |",
            "| KL, nats | " + " | ".join(f"{row['kl']:.4f}" for row in rows) + " |",
        ]
    )


#: Marker on the page -> results file and what makes the table of it.
TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "decode": ("launch_census", lambda r: launch_census.table(r, "decode")),
    "prefill": ("launch_census", lambda r: launch_census.table(r, "prefill")),
    "cpu": ("decode", decode.table),
    "long_prompt": ("long_prompt", long_prompt.table),
    "experts": ("experts", experts_table),
    "top_p": ("expert_top_p", top_p_table),
}


def filled(page: str) -> str:
    """``page`` with every table as its results file, if there is one, has it."""
    for marker, (name, table) in TABLES.items():
        if not (RESULTS / f"{name}.json").exists():
            continue
        result = json.loads((RESULTS / f"{name}.json").read_text())
        page = with_table(page, marker, table(result))
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
