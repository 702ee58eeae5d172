"""The tables of docs/quality.md and its pictures, from the results file."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from page_tables import with_table
from quality_cases import BUDGET, CHOSEN_BY, FIXED, MIDDLE
from quality_subject import KEPT

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quality.md"
PICTURES = ROOT / "docs" / "pictures"
PLANS = (*FIXED, *(f"budget by {name}" for name in CHOSEN_BY))

Result = Mapping[str, Any]


def write_page(result: Result) -> None:
    """Put tables into the page, and draw the pictures beside it."""
    from quality_pictures import draw

    PAGE.write_text(filled(PAGE.read_text("utf-8"), result), encoding="utf-8")
    draw(result, PICTURES)


def filled(page: str, result: Result) -> str:
    """``page`` with the tables of ``result`` between its marks."""
    for name, table in TABLES.items():
        page = with_table(page, name, table(result))
    return page


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] + ["---:"] * (len(heads) - 1), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _span(estimate: Mapping[str, float | None]) -> str:
    """A ratio with its interval."""
    if estimate["low"] is None:
        return f"{estimate['value']:.2f}"
    return f"{estimate['value']:.2f} ({estimate['low']:.2f} to {estimate['high']:.2f})"


def _sizes_of(result: Result) -> dict[tuple[int, str, str], Mapping[str, Any]]:
    return {
        (row["seed"], row["size"], row["plan"]): row
        for row in result["builds"]
        if row["part"] == "sizes"
    }


def run_table(result: Result) -> str:
    """What was judged, by part and seed."""
    seeds = list(next(iter(result["judged"].values())))
    counts = (
        [part, *(str(by_seed[seed]) for seed in seeds)]
        for part, by_seed in result["judged"].items()
    )
    return _table(["builds judged", *(f"seed {seed}" for seed in seeds)], counts)


def kl_table(result: Result) -> str:
    """KL of every plan by size and seed."""
    found = _sizes_of(result)
    seeds = sorted({seed for seed, _, _ in found})
    rows = []
    for keep in KEPT:
        for plan in PLANS:
            cells = [found.get((seed, str(keep), plan)) for seed in seeds]
            if any(cells):
                sized = [cell["bytes"] for cell in cells if cell]
                shown = (f"{c['kl']['value']:.4f}" if c else "" for c in cells)
                rows.append([f"{keep}: {plan}", *shown, f"{max(sized):,}"])
    return _table(["size: plan", *(f"seed {s}" for s in seeds), "bytes"], rows)


def goal_table(result: Result) -> str:
    """Budget's KL over that of others: each seed."""
    rows = [
        [
            f"{row['size']}, seed {row['seed']}: {row['against']}"
            + (f" ({row['plan']})" if row["plan"] != row["against"] else ""),
            _span(row["ratio"]),
            f"{row['goal']:g}",
            "met" if row["met"] else "missed",
            "yes" if row["whole_interval"] else "no",
        ]
        for row in result["goals"]
    ]
    heads = ("size, seed: against", "KL, budget : it", "goal", "", "whole interval")
    return _table(heads, rows)


def way_table(result: Result) -> str:
    """How often budget's plans by each way reach the goals, over sizes and seeds."""
    found = _sizes_of(result)
    cases = sorted({(seed, size) for seed, size, _ in found})
    rows = []
    for way in CHOSEN_BY:
        met = [0, 0, 0]
        for seed, size in cases:
            kl = {p: found[seed, size, p]["kl"]["value"] for p in FIXED}
            mine = found[seed, size, f"budget by {way}"]["kl"]["value"]
            met[0] += mine <= 0.8 * kl["graded"]
            met[1] += mine <= 0.6 * kl["uniform"]
            met[2] += mine <= min(kl.values())
        rows.append([way, *(f"{count} of {len(cases)}" for count in met)])
    heads = ("budget by", "0.8 of graded", "0.6 of uniform", "best rule")
    return _table(heads, rows)


def ratio_table(result: Result) -> str:
    """Ratios over all seeds."""
    rows = [
        [
            f"{row['size']}: {row['of']} : {row['to']}",
            f"{row['seeds']}",
            f"{row['calibrations']}",
            _span(row["ratio"]),
        ]
        for row in result["ratios"]
    ]
    heads = ("size: ratio of KL", "seeds", "calibrations each", "all together")
    return _table(heads, rows)


def noise_table(result: Result) -> str:
    """What random plans and other calibrations do to KL."""
    rows = []
    for row in result["noise"]:
        if random := row.get("random"):
            cells = (f"{random[n]:.4f}" for n in ("mean", "deviation", "least", "most"))
            better = f"{random['better_than_uniform']} of {random['plans']}"
            rows.append([f"seed {row['seed']}", *cells, better])
    heads = ("random plans", "mean KL", "deviation", "least", "most")
    first = _table([*heads, "better than uniform"], rows)
    rows = []
    for row in result["noise"]:
        for name, found in row["calibrations"].items():
            rows.append(
                [
                    f"seed {row['seed']}: {name}",
                    f"{found['first']:.4f}",
                    ", ".join(f"{kl:.4f}" for kl in found["others"]),
                    f"{found['deviation']:.4f}",
                    f"{found['documents']:.4f}",
                ]
            )
    heads = (
        "plan",
        "KL",
        "by other calibrations",
        "deviation of these",
        "of documents",
    )
    return f"{first}\n\n{_table(heads, rows)}" if rows else first


def domain_table(result: Result) -> str:
    """What a plan for one domain does to the others, mean over seeds."""
    rows = []
    found = result["domains"]
    corpora = list(found[0]["corpora"]) if found else []
    for domain in dict.fromkeys(row["domain"] for row in found):
        for kind in dict.fromkeys(row["kind"] for row in found):
            some = [r for r in found if (r["domain"], r["kind"]) == (domain, kind)]
            for what in ("KL", "perplexity"):
                cells = [
                    _domain_cell([r["corpora"][c] for r in some], what) for c in corpora
                ]
                rows.append([f"{kind} for {domain}: {what}", *cells])
    return _table(["plan", *corpora], rows)


def _domain_cell(some: list[Mapping[str, Any]], what: str) -> str:
    if what == "perplexity":
        own, general = (
            mean(c[n] for c in some) for n in ("ppl_ratio", "general_ppl_ratio")
        )
        return f"{own:.3f} (all text: {general:.3f})"
    values = [c["kl_ratio"]["value"] for c in some]
    return f"×{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def quantiser_table(result: Result) -> str:
    """KL of low banks by both quantisers."""
    rows = [
        [
            f"{row['size']}, seed {row['seed']}: {row['plan']}",
            f"{row['plain']:.4f}",
            f"{row['ours']:.4f}",
            _span(row["ratio"]),
        ]
        for row in result["quantisers"]
    ]
    return _table(("size, seed: plan", "mx.quantize", "ours", "ours : it"), rows)


def speed_table(result: Result) -> str:
    """The fewest bytes a token at the KL of graded with 8 bits."""
    rows = []
    for row in result["speed"]:
        cells = [f"seed {row['seed']}", f"{row['reference_kl']:.4f}"]
        cells.append(f"{row['reference_bytes_per_token']:,}")
        if "share" in row:
            cells += [
                f"{row['kl']:.4f}",
                f"{row['bytes_per_token']:,}",
                f"{row['share']:.3f}",
            ]
        else:
            cells += ["", "", "none found"]
        rows.append([*cells, "met" if row["met"] else "missed"])
    heads = (
        "",
        "KL, graded at 8 bits",
        "bytes a token",
        "KL, budget",
        "bytes a token",
        "share",
    )
    return _table([*heads, f"goal {0.7}"], rows)


def rank_table(result: Result) -> str:
    """How well each way of predicting damage orders builds."""
    found = result["rank_correlation"]
    rows = []
    for way, by_scope in found["ways"].items():
        cells = []
        for scope in found["scopes"]:
            one = by_scope.get(scope)
            if one is None:
                cells.append("")
            elif "low" not in one:
                cells.append(f"{one['mean']:.2f}")
            else:
                cells.append(
                    f"{one['mean']:.2f} ({one['low']:.2f} to {one['high']:.2f})"
                )
        rows.append([way, *cells])
    return _table(["judged by", *found["scopes"]], rows)


def predicted_table(result: Result) -> str:
    """Measured KL over what the best way predicts, by plan and size; mean over seeds."""
    rows = [
        [plan, *(_measured_to_predicted(result, plan, str(keep)) for keep in KEPT)]
        for plan in PLANS
    ]
    return _table(["measured : predicted", *map(str, KEPT)], rows)


def _measured_to_predicted(result: Result, plan: str, size: str) -> str:
    way = result["budget"]
    ratios = [
        row["kl"]["value"] / row["predicted"][way]
        for row in result["builds"]
        if (row["part"], row["plan"], row["size"]) == ("sizes", plan, size)
    ]
    return f"{mean(ratios):.2f}" if ratios else ""


TABLES: dict[str, Callable[[Result], str]] = {
    "run": run_table,
    "kl": kl_table,
    "goals": goal_table,
    "ways": way_table,
    "ratios": ratio_table,
    "noise": noise_table,
    "domains": domain_table,
    "quantisers": quantiser_table,
    "speed": speed_table,
    "ranks": rank_table,
    "predicted": predicted_table,
}

__all__ = ["BUDGET", "MIDDLE", "PAGE", "PICTURES", "TABLES", "filled", "write_page"]
