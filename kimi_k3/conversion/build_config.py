"""The ``config.json`` of a build: the source's, with what the plan changes."""

import copy
from collections.abc import Mapping
from typing import Any

from ..checkpoint.names import PREFIX
from ..checkpoint.stored_format import StoredFormat
from ..config import ModelArgs
from ..models import Model
from ..planning.expert_plan import HIGH, ExpertPlan
from ..planning.matrix_classes import (
    affine_format,
    class_matrices,
    inputs_of,
    refuse_unknown_classes,
)

EXPERT_MATRICES = ("gate_proj", "up_proj", "down_proj")


def build_config(source: Mapping[str, Any], plan: ExpertPlan) -> dict[str, Any]:
    """``source``, a config of the release's format, as ``plan`` makes it.

    Counts that are the same in every layer are stated as ``num_experts`` alone, which
    any loader of Kimi K3 reads; others in ``expert_counts``, as the published builds do.
    The record of the conversion is not part of this.

    Raises PlanError for a plan of another checkpoint.
    """
    config: dict[str, Any] = copy.deepcopy(dict(source))
    plan.check_fits(ModelArgs.from_dict(config).text_config)
    text = config["text_config"]
    for block in (config, text):
        for key in ("quantization", "quantization_config"):
            block.pop(key, None)
    counts = [len(plan.order(layer)) for layer in range(text["num_hidden_layers"])]
    splits = [plan.split(layer) for layer in range(text["num_hidden_layers"])]
    if len(found := {counts[layer] for layer in plan.layers}) == 1:
        text["num_experts"] = found.pop()
    else:
        text["expert_counts"] = counts
    if any(splits):
        text["expert_bank_split"] = splits
    config["quantization"] = HIGH.parameters | _entries(config, plan)
    return config


def module_formats(model: Model, plan: ExpertPlan) -> dict[str, StoredFormat]:
    """Path → format of every module that ``plan`` quantises, of the build's ``model``.

    ``model`` is lazily built from the build's own config, and dense. Raises PlanError
    for a class of matrices that it does not have.
    """
    formats: dict[str, StoredFormat] = {}
    for layer in plan.layers:
        experts = f"{PREFIX}model.layers.{layer}.mlp.switch_mlp"
        for matrix in EXPERT_MATRICES:
            if plan.split(layer):
                formats[f"{experts}.bank_hi.{matrix}"] = HIGH
                formats[f"{experts}.bank_lo.{matrix}"] = plan.low_format
            else:
                formats[f"{experts}.{matrix}"] = plan.expert_format(layer)
    matrices = list(class_matrices(model))
    refuse_unknown_classes(plan.bits, {name for name, _, _ in matrices})
    for name, path, module in matrices:
        stored = affine_format(plan.bits.get(name, 16), inputs_of(module))
        if stored is not None:
            formats[path] = stored
    return formats


def _entries(config: dict[str, Any], plan: ExpertPlan) -> dict[str, Any]:
    """An entry of the quantisation block for each module that is not as the default."""
    model = Model(ModelArgs.from_dict(config | {"quantization": HIGH.parameters}))
    return {
        path: stored.parameters
        for path, stored in module_formats(model, plan).items()
        if stored != HIGH or ".bank_" in path
    }
