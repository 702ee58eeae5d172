"""Put the figures of benchmarks/results/prompt_cache.json into docs/prompt-cache.md.

    python benchmarks/prompt_cache_page.py

Rewrites what stands between the page's markers, ``<!-- name -->`` and ``<!-- /name -->``.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.config import ModelArgs, TextArgs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "prompt-cache.md"
RESULT = ROOT / "benchmarks" / "results" / "prompt_cache.json"


def snapshot_bytes(args: TextArgs, tokens: int, *, item: int = 2) -> int:
    """Bytes of what the caches hold of one sequence of ``tokens``, without spare room.

    ``item`` is the size of an activation; the states of KDA layers are float32.
    """
    linear = args.linear_attn_config
    layers = len(linear.kda_layers)
    width = linear.num_heads * linear.head_dim
    state = 4 * width * linear.head_dim
    convolutions = item * 3 * width * (linear.short_conv_kernel_size - 1)
    latents = item * (args.kv_lora_rank + args.qk_rope_head_dim) * tokens
    return layers * (state + convolutions) + len(linear.full_attn_layers) * latents


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
    lines = ["| request | tokens in the prompt | read |", "|---|---|---|"]
    for name, row in result["conversations"].items():
        if "changed" in row:
            requests = {name: row["changed"][0], f"{name}: the next": row["next"]}
            for words, one in requests.items():
                lines.append(f"| {words} | {one['prompt']:,} | {one['read']:,} |")
    for name, one in result["afterwards"].items():
        lines.append(f"| {name} | {one['prompt']:,} | {one['read']:,} |")
    return "\n".join(lines)


def memory_table(_: dict[str, Any]) -> str:
    """Bytes of an entry of the released model by length."""
    args = ModelArgs.from_dict(full_size_config()).text_config
    lengths = (0, 8_192, 32_768, 131_072, 262_144)
    cells = [f"{snapshot_bytes(args, length) / 1e9:.2f} GB" for length in lengths]
    return "\n".join(
        [
            "| tokens | " + " | ".join(f"{length:,}" for length in lengths) + " |",
            "|---" * (len(lengths) + 1) + "|",
            "| one entry | " + " | ".join(cells) + " |",
        ]
    )


#: GB that the GPU of a 512 GB Mac can be given, and that a build for it takes.
GPU, WEIGHTS = 515, 450


def mac_table(_: dict[str, Any]) -> str:
    """How the memory beside the weights is shared out on a 512 GB Mac, in GB."""
    args = ModelArgs.from_dict(full_size_config()).text_config
    longest, step, bound = 131_072, 256, 20
    one = snapshot_bytes(args, longest) / 1e9
    scores = 2 * args.num_attention_heads * step * longest / 1e9
    left = GPU - WEIGHTS - scores - 4 * one - bound
    rows = [
        ("beside the weights", GPU - WEIGHTS, f"{GPU} - {WEIGHTS}"),
        (
            "scores, with `--prefill-step-size 256`",
            -scores,
            f"{args.num_attention_heads} heads × {step} × {longest:,} × 2 bytes",
        ),
        ("entries that a request adds", -4 * one, f"4 × {one:.2f}"),
        ("`--prompt-cache-bytes`", -bound, "entries and running answers"),
        ("left for everything else", left, "other activations, more answers at once"),
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
        begin, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}\n{table(result)}\n{end}{after}"
    return page


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text(), json.loads(RESULT.read_text())))


if __name__ == "__main__":
    main()
