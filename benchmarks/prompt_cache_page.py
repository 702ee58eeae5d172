"""Put the figures of benchmarks/results/prompt_cache.json into docs/prompt-cache.md.

    python benchmarks/prompt_cache_page.py

Rewrites what stands between the page's markers, ``<!-- name -->`` and ``<!-- /name -->``.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_tables import with_table

from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.config import ModelArgs, TextArgs
from kimi_k3.machine.sequence_memory import state_bytes, token_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "prompt-cache.md"
RESULT = ROOT / "benchmarks" / "results" / "prompt_cache.json"


def snapshot_bytes(args: TextArgs, tokens: int, *, item: int = 2) -> int:
    """Bytes of what the caches hold of one sequence of ``tokens``, without spare room.

    ``item`` is the size of an activation.
    """
    return tokens * token_bytes(args, size=item) + state_bytes(args, size=item)


def conversations_table(result: dict[str, Any]) -> str:
    """What whole conversations had read."""
    lines = [
        "| conversation | requests | tokens in their prompts | read | of them |",
        "|---|---|---|---|---|",
    ]
    for name, row in result["conversations"].items():
        share = f"{row['read'] / row['prompt_tokens']:.0%}"
        counts = f"{row['requests']} | {row['prompt_tokens']:,} | {row['read']:,}"
        lines.append(f"| {name} | {counts} | {share} |")
    return "\n".join(lines)


def changes_table(result: dict[str, Any]) -> str:
    """What single requests had read."""
    turns = result["turns"]
    # What the benchmark's once() and last() do.
    changed, edited = turns // 2 + 1, {"first": 1, "fifth": 5, "last": turns}
    rows = []
    for name, row in result["conversations"].items():
        if "changed" in row:
            rows.append((changed, name, row["changed"][0]))
            rows.append((changed + 1, f"{name}: the next", row["next"]))
    for name, one in result["afterwards"].items():
        rows.append((edited[name.partition(" ")[0]], name, one))
    lines = ["| turn | request | tokens in the prompt | read |", "|---|---|---|---|"]
    for turn, name, one in rows:
        lines.append(f"| {turn} | {name} | {one['prompt']:,} | {one['read']:,} |")
    return "\n".join(lines)


#: GB that the GPU of a 512 GB Mac can be given, that a build for it takes, and that the
#: command of docs/serving.md gives to entries.
GPU, WEIGHTS, BOUND = 515, 450, 20


def memory_table(_: dict[str, Any]) -> str:
    """Bytes of an entry of the released model by length, and how many fit the bound."""
    args = ModelArgs.from_dict(full_size_config()).text_config
    lengths = (0, 8_192, 32_768, 131_072, 262_144)
    sizes = [snapshot_bytes(args, length) for length in lengths]
    cells = [f"{size / 1e9:.2f} GB" for size in sizes]
    fitting = [str(BOUND * 10**9 // size) for size in sizes]
    return "\n".join(
        [
            "| tokens | " + " | ".join(f"{length:,}" for length in lengths) + " |",
            "|---" * (len(lengths) + 1) + "|",
            "| one entry | " + " | ".join(cells) + " |",
            f"| entries that fit in {BOUND} GB | " + " | ".join(fitting) + " |",
        ]
    )


def mac_table(_: dict[str, Any]) -> str:
    """How the memory beside the weights is shared out on a 512 GB Mac, in GB."""
    args = ModelArgs.from_dict(full_size_config()).text_config
    one = snapshot_bytes(args, 131_072) / 1e9
    left = GPU - WEIGHTS - 4 * one - BOUND
    rows = [
        ("beside the weights", GPU - WEIGHTS, f"{GPU} - {WEIGHTS}"),
        ("entries that a request adds", -4 * one, f"4 × {one:.2f}"),
        ("`--prompt-cache-bytes`", -BOUND, "entries and running answers"),
        ("left for everything else", left, "activations, more answers at once"),
    ]
    lines = ["| what | GB | arithmetic |", "|---|---|---|"]
    lines += [f"| {what} | {gb:.1f} | {sum_} |" for what, gb, sum_ in rows]
    return "\n".join(lines)


#: Marker on the page -> what makes its table of the results file.
TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "conversations": conversations_table,
    "changes": changes_table,
    "memory": memory_table,
    "mac": mac_table,
}


def filled(page: str, result: dict[str, Any]) -> str:
    """``page`` with every table as the results file has it."""
    for marker, table in TABLES.items():
        page = with_table(page, marker, table(result))
    return page


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
