"""The metadata of a model card, as the Hugging Face hub reads it."""

from typing import Any

from .report_facts import BuildFacts

#: The release's repository on the hub, and what its licence is called there.
RELEASE, LICENCE = "moonshotai/Kimi-K3", "kimi-k3"


def metadata(facts: BuildFacts) -> dict[str, Any]:
    """Arguments of ``ModelCardData``: only what the build itself shows to be so."""
    found: dict[str, Any] = {
        "library_name": "mlx",
        "pipeline_tag": "text-generation",
        "tags": tags(facts),
    }
    if facts.is_k3:
        found |= {
            "base_model": RELEASE,
            "base_model_relation": "quantized",
            "license": "other",
            "license_name": LICENCE,
        }
    elif facts.licence:
        found["license"] = "other"
    if facts.licence:
        found["license_link"] = facts.licence
    return found


def tags(facts: BuildFacts) -> list[str]:
    """What readers of the hub look for."""
    found = ["mlx", "kimi-k3", "kimi-k3-mlx", "moe"]
    before = facts.source_experts
    if before is not None and before > facts.experts:
        found.append("pruned")
    bits = {text.split()[-1] for part in facts.parts for text in part.formats}
    return found + sorted(name for name in bits if name.endswith("-bit"))
