"""``config.json``: every key is required, defaulted or inert, and no value slips by."""

import copy
import json
import math
import re
import warnings
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from closeness import assert_same, relative_error
from damage import GRADED
from golden_data import Case
from mlx_lm.utils import load_model

from kimi_k3.checkpoint.source_layout import full_size_config
from kimi_k3.config import LinearAttentionArgs, ModelArgs, TextArgs
from kimi_k3.config.keys import (
    DEFAULTS,
    INERT,
    LINEAR_DEFAULTS,
    LINEAR_REQUIRED,
    NULLABLE,
    REQUIRED,
    SUPPORTED,
)
from kimi_k3.errors import (
    CheckpointError,
    ConfigError,
    ForeignCheckpointError,
    UnknownKeyWarning,
)
from kimi_k3.models import Model

DOCUMENT = Path(__file__).parents[1] / "docs" / "checkpoints.md"

Config = dict[str, Any]


def graded_config() -> Config:
    """The config of a two-bank build: it has keys of every list."""
    return json.loads((GRADED / "config.json").read_text())


def linear_of(config: Config) -> Config:
    return config["text_config"]["linear_attn_config"]


def changed(config: Config, key: str, value: Any) -> Config:
    """A copy with one key set: of text_config, or ``linear.KEY``, or ``top.KEY``."""
    config = copy.deepcopy(config)
    room, _, name = key.rpartition(".")
    rooms = {"": config["text_config"], "linear": linear_of(config), "top": config}
    rooms[room][name] = value
    return config


# The lists


def test_every_key_is_in_one_list() -> None:
    names = [*REQUIRED, *DEFAULTS, *INERT]
    assert len(names) == len(set(names))
    assert set(REQUIRED) | set(DEFAULTS) == {f.name for f in fields(TextArgs)}
    assert set(NULLABLE) <= set(REQUIRED)
    linear = {f.name for f in fields(LinearAttentionArgs)}
    assert set(LINEAR_REQUIRED) | set(LINEAR_DEFAULTS) == linear
    assert set(SUPPORTED) <= {f.name for f in fields(TextArgs)}


def test_defaults_are_those_of_the_dataclasses() -> None:
    for cls, defaults in ((TextArgs, DEFAULTS), (LinearAttentionArgs, LINEAR_DEFAULTS)):
        own = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        assert own == defaults


def documented(heading: str) -> list[list[str]]:
    """Cells of the table under ``heading`` in the documentation."""
    text = DOCUMENT.read_text()
    section = text.partition(f"### {heading}\n")[2].partition("\n#")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows, f"no table under {heading!r}"
    return [[cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows]


def test_the_document_shows_the_lists() -> None:
    required = documented("Required")
    assert [row[0] for row in required] == [
        *REQUIRED,
        *(f"linear_attn_config.{key}" for key in LINEAR_REQUIRED),
    ]
    nullable = {row[0] for row in required if "null" in row[1]}
    assert nullable == set(NULLABLE)
    defaulted = {row[0]: row[1] for row in documented("Defaulted")}
    wanted = DEFAULTS | {
        f"linear_attn_config.{key}": value for key, value in LINEAR_DEFAULTS.items()
    }
    assert defaulted == {key: json.dumps(value) for key, value in wanted.items()}
    supported = {row[0]: row[1] for row in documented("Supported values")}
    assert supported == {key: json.dumps(v[0]) for key, v in SUPPORTED.items()}
    section = DOCUMENT.read_text().partition("### Inert\n")[2].partition("\n#")[0]
    assert set(re.findall(r"`(\w+)`", section)) == INERT


# Keys taken away, one at a time


def removals(config: Config) -> list[str]:
    keys = [*config["text_config"], *(f"linear.{key}" for key in linear_of(config))]
    assert len(keys) > 40
    return keys


def removed(config: Config, key: str) -> Config:
    config = copy.deepcopy(config)
    room = linear_of(config) if key.startswith("linear.") else config["text_config"]
    del room[key.removeprefix("linear.")]
    return config


def check_removal(config: Config, key: str) -> None:
    """A named error, the documented default, or nothing at all."""
    name = key.removeprefix("linear.")
    linear = key != name
    less = removed(config, key)
    if name in (LINEAR_REQUIRED if linear else REQUIRED):
        with pytest.raises(
            ConfigError, match=rf"\.{name} is missing from config\.json"
        ):
            ModelArgs.from_dict(less)
        return
    left = ModelArgs.from_dict(less)
    if name in (defaults := LINEAR_DEFAULTS if linear else DEFAULTS):
        assert left == ModelArgs.from_dict(changed(config, key, defaults[name]))
    elif name != "quantization_config":
        assert name in INERT
        assert left == ModelArgs.from_dict(config)
        assert left == ModelArgs.from_dict(changed(config, key, [{"odd": 1}]))


def test_removing_each_key(golden: Case) -> None:
    for key in removals(golden.config):
        check_removal(golden.config, key)


def test_removing_each_key_of_a_build(build: Case) -> None:
    for key in removals(build.config):
        check_removal(build.config, key)


def test_removing_each_key_of_the_release() -> None:
    config = full_size_config()
    for key in (*config["text_config"], *(f"linear.{k}" for k in linear_of(config))):
        check_removal(config, key)


@pytest.mark.filterwarnings("ignore:this build stores the router")
def test_removing_a_key_leaves_the_logits(golden: Case) -> None:
    """Or gives those of the default, where the golden case has another value."""
    ids = mx.array([[3, 1, 40, 7]])

    def logits(config: Config) -> mx.array:
        model, _ = load_model(golden.folder, model_config=config)
        return model(ids)

    config = golden.config
    want = logits({})
    tried = 0
    for key in removals(config):
        name = key.removeprefix("linear.")
        defaults = LINEAR_DEFAULTS if key != name else DEFAULTS
        if name not in defaults:
            continue
        got = logits(removed(config, key))
        room = linear_of(config) if key != name else config["text_config"]
        same = room[name] == defaults[name]
        if same or name in ("num_key_value_heads", "max_position_embeddings"):
            assert_same(got, want, where=key)
        else:
            default = logits(changed(config, key, defaults[name]))
            assert_same(got, default, where=key)
            assert relative_error(got, want) > 1e-3, f"{key} changes nothing"
        tried += 1
    assert tried > 10


@pytest.mark.parametrize("key", ["expert_counts", "expert_bank_split"])
def test_a_pruned_build_needs_its_lists(key: str) -> None:
    less = removed(graded_config(), key)
    with pytest.raises((ConfigError, CheckpointError), match=r"layer \d: "):
        load_model(GRADED, model_config=less)


# Keys that nobody knows


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("brand_new", "text_config.brand_new"),
        ("linear.brand_new", "text_config.linear_attn_config.brand_new"),
    ],
)
def test_an_unknown_key_gives_one_warning(golden: Case, key: str, said: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_model(golden.folder, model_config=changed(golden.config, key, 1))
    (warning,) = caught
    assert warning.category is UnknownKeyWarning
    assert f"sets {said}, which kimi-k3-mlx does not know" in str(warning.message)


def test_unknown_keys_share_a_warning() -> None:
    config = changed(changed(graded_config(), "b_new", 1), "a_new", None)
    with pytest.warns(UnknownKeyWarning, match=r"text_config.a_new, text_config.b_new"):
        ModelArgs.from_dict(config)


def test_unknown_settings_of_the_widths_are_told() -> None:
    config = graded_config()
    config["quantization"] |= {"secret": 3, "model.norm": False}
    with pytest.warns(UnknownKeyWarning, match=r"sets quantization\.secret, which"):
        ModelArgs.from_dict(config)


def test_real_configs_give_no_warning(golden: Case) -> None:
    ModelArgs.from_dict(golden.config)  # warnings are errors here
    ModelArgs.from_dict(full_size_config())


@pytest.mark.parametrize("value", [True, False])
def test_what_hosts_inject_is_inert(golden: Case, value: bool) -> None:
    want = ModelArgs.from_dict(golden.config)
    for key in ("quantize_activations", "top.quantize_activations", "top.eos_token_id"):
        assert ModelArgs.from_dict(changed(golden.config, key, value)) == want


# Values that nobody can run

UNSUPPORTED = {
    "hidden_act": "silu",
    "moe_router_activation_func": "softmax",
    "topk_method": "greedy",
    "mla_use_nope": False,
    "num_nextn_predict_layers": 1,
    "norm_type": "layernorm",
}


def test_unsupported_values_are_refused() -> None:
    assert set(UNSUPPORTED) == set(SUPPORTED)
    for key, value in UNSUPPORTED.items():
        with pytest.raises(
            ConfigError, match=rf"text_config\.{key} is .*only .* is supp"
        ):
            ModelArgs.from_dict(changed(graded_config(), key, value))


def test_null() -> None:
    config = graded_config()
    for key in REQUIRED:
        nulled = changed(config, key, None)
        if key in NULLABLE:
            assert getattr(ModelArgs.from_dict(nulled).text_config, key) is None
            continue
        with pytest.raises(ConfigError, match=rf"text_config\.{key} is null"):
            ModelArgs.from_dict(nulled)
    for key in LINEAR_REQUIRED:
        with pytest.raises(ConfigError, match=rf"linear_attn_config\.{key} is None"):
            ModelArgs.from_dict(changed(config, f"linear.{key}", None))
    for key, value in DEFAULTS.items():
        default = ModelArgs.from_dict(changed(config, key, value))
        assert ModelArgs.from_dict(changed(config, key, None)) == default


WRONG = {
    "hidden_size": ("64", 64.0, True, [64], {}, 0, -1, 2**31),
    "num_hidden_layers": (0, -3, 10**30, "8"),
    "num_experts": ("many", -1, 3.5),
    "num_experts_per_token": (0, 17, None),
    "rms_norm_eps": ("1e-5", 0, -1e-5, math.inf, math.nan, [1e-5]),
    "activation_situ_beta": (0, -4.0, "4"),
    "activation_situ_linear_beta": (0.0, "25"),
    "routed_scaling_factor": (0, -1.0, math.nan),
    "moe_renormalize": (1, "true"),
    "mla_use_output_gate": (0, "false"),
    "moe_layer_freq": (0, -1),
    "attn_res_block_size": (0, 2.0),
    "q_lora_rank": (0, "48"),
    "routed_expert_hidden_size": (0, False),
    "hidden_act": (7, ["situ"]),
    "linear_attn_config": ("kda", [], 3),
    "linear.kda_layers": (3, "1,2,3", {}, [1.0], ["1"], [True]),
    "linear.num_heads": (0, "4", 4.0),
    "linear.short_conv_kernel_size": (1, 0, "4"),
    "linear.use_full_rank_gate": ("true", 1),
    "linear.gate_lower_bound": (0, 5.0, "-5", -math.inf),
    "expert_counts": (7, "all", [7], {}, [None] * 8),
    "expert_bank_split": (7, [1] * 7, [-1] * 8, [99] * 8),
    "num_key_value_heads": (1, "4"),
    "top.text_config": (3, [], "text"),
    "top.vision_config": (3, [], "none"),
    "top.quantization": (3, [], "4bit", True, {}),
    "top.quantization_config": (3, "mxfp4"),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_types_and_absurd_values(key: str) -> None:
    config = graded_config()
    if key == "top.quantization_config":
        del config["quantization"]
    name = key.rpartition(".")[2]
    for value in WRONG[key]:
        with pytest.raises(ConfigError, match=rf"{name}|layer \d|layers") as caught:
            ModelArgs.from_dict(changed(config, key, value))
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "sizes",
    [
        {"linear.num_heads": 2**20, "linear.head_dim": 2**12},
        {"num_attention_heads": 2**26, "num_key_value_heads": 2**26},
        {"kv_lora_rank": 2**31 - 1},
        {"num_shared_experts": 2**30},
    ],
)
def test_sizes_that_cannot_be_indexed_together(sizes: Config) -> None:
    config = graded_config()
    for key, value in sizes.items():
        config = changed(config, key, value)
    with pytest.raises(ConfigError, match="more than MLX can index"):
        ModelArgs.from_dict(config)


def test_layers_are_named_once() -> None:
    config = graded_config()
    for kda, full, message in (
        ([1, 2, 3, 5, 6], [4, 8], r"counted from 1; layer 7 is missing"),
        ([1, 2, 3, 5, 6, 7, 9], [4, 8], r"layer 9 is none"),
        ([1, 2, 3, 3, 6, 7], [4, 8], r"layer 5 is missing"),
        ([1, 2, 3, 3, 5, 6, 7], [4, 8], r"layer 3 is twice"),
        ([1, 2, 3, 4, 6, 7], [4, 8], r"lists layer 4 as KDA and as full attention"),
        ([0, 1, 2, 4, 5, 6], [3, 7], r"counted from 1; layer 8 is missing"),
    ):
        lists = changed(config, "linear.kda_layers", kda)
        lists = changed(lists, "linear.full_attn_layers", full)
        with pytest.raises(ConfigError, match=message):
            ModelArgs.from_dict(lists)


def test_a_claim_of_a_billion_layers_is_cheap() -> None:
    with pytest.raises(
        ConfigError, match=r"layers 1\.\.1000000000 .*layer 9 is missing"
    ):
        ModelArgs.from_dict(changed(graded_config(), "num_hidden_layers", 10**9))


@pytest.mark.parametrize(
    ("groups", "best", "message"),
    [
        (2, 3, r"topk_group is 3, but there are only 2 groups"),
        (5, 1, r"layer 1 keeps 16 experts, which num_expert_group 5 does not divide"),
        (16, 4, r"layer 1 has 1 experts in each of 16 groups; the router needs two"),
        (8, 1, r"layer 1 has 2 experts in each of 8 groups; .* and 4 in 1 groups"),
    ],
)
def test_router_groups(groups: int, best: int, message: str) -> None:
    config = graded_config()
    del (
        config["text_config"]["expert_counts"],
        config["text_config"]["expert_bank_split"],
    )
    config = changed(changed(config, "num_expert_group", groups), "topk_group", best)
    with pytest.raises(ConfigError, match=message):
        ModelArgs.from_dict(config)


def test_groups_need_the_grouped_choice() -> None:
    config = graded_config()
    del (
        config["text_config"]["expert_counts"],
        config["text_config"]["expert_bank_split"],
    )
    config = changed(changed(config, "num_expert_group", 4), "topk_group", 2)
    ModelArgs.from_dict(config)
    with pytest.raises(ConfigError, match="use_grouped_topk is false"):
        ModelArgs.from_dict(changed(config, "use_grouped_topk", False))


ODD = (None, True, False, -1, 0, 1, 7, 2**31 - 1, 10**30, 1.5, math.nan, "x")
ODD_OBJECTS = ([], {}, [1], [[1]], {"a": 1})


def test_no_value_of_any_key_ends_in_a_traceback() -> None:
    """Each key with each odd value: a ConfigError, or a model that can be built."""
    config = graded_config()
    keys = [*config["text_config"], *(f"linear.{key}" for key in linear_of(config))]
    keys += [f"top.{key}" for key in config if key != "model_type"]
    refused = 0
    for key in (*keys, "linear.gate_lower_bound"):
        for value in (*ODD, *ODD_OBJECTS):
            try:
                args = ModelArgs.from_dict(changed(config, key, value))
            except ConfigError:
                refused += 1
                continue
            if key.rpartition(".")[2] in (*REQUIRED, *DEFAULTS, *LINEAR_REQUIRED):
                Model(args)
    assert refused > 500


# The block that says how tensors are stored


def width(**values: Any) -> Config:
    return {"bits": 4, "group_size": 64, "mode": "affine"} | values


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"bits": 4}, r"quantization lacks group_size"),
        (width(bits="4"), r"quantization: bits is '4'; wanted a whole number"),
        (width(mode="gguf"), r"quantization: mode is 'gguf'; MLX has affine, mxfp4"),
        (width(a={"bits": 4}), r"quantization entry a lacks group_size"),
        (width(a=width(bits=0)), r"quantization entry a: bits is 0"),
        (width(a=width(mode=None)), r"quantization entry a: mode is None"),
    ],
)
def test_widths_that_make_no_sense(block: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelArgs.from_dict(changed(graded_config(), "top.quantization", block))


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (width(), r"widths only under quantization_config.*as 'quantization'"),
        ({"quant_method": "awq", "bits": 4}, r"format is None \(quant_method 'awq'\)"),
        ({"quant_method": "fp8"}, r"format is None \(quant_method 'fp8'\)"),
        (
            {"quant_method": "compressed-tensors"},
            r"format is None \(quant_method 'compressed-tensors'\)",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            r"'float-quantized'.*mxfp4-pack-quantized",
        ),
        ({"format": "mxfp4-pack-quantized"}, r"\(quant_method None\)"),
        ({}, r"format is None"),
    ],
)
@pytest.mark.parametrize("place", ["top.quantization_config", "quantization_config"])
def test_blocks_of_other_formats(block: Config, message: str, place: str) -> None:
    config = graded_config()
    del config["quantization"]
    with pytest.raises(ConfigError, match=message):
        ModelArgs.from_dict(changed(config, place, block))


def test_quantization_wins_over_the_source_block() -> None:
    config = changed(graded_config(), "quantization_config", {"format": "nonsense"})
    assert ModelArgs.from_dict(config).quantization == config["quantization"]


def test_a_flat_config_is_its_text_config() -> None:
    config = graded_config()
    flat = {**config["text_config"], "quantization": config["quantization"]}
    flat["model_type"] = "kimi_k3"
    args = ModelArgs.from_dict(flat)
    assert args.text_config == ModelArgs.from_dict(config).text_config
    assert args.quantization == config["quantization"]
    assert args.vision_config is None


@pytest.mark.parametrize("name", ["kimi_k3_mlx", "kimi_k3_uvmax", "kimi_k3_offload"])
def test_other_tools_configs_are_refused(name: str) -> None:
    with pytest.raises(ForeignCheckpointError, match=name):
        ModelArgs.from_dict(changed(graded_config(), "top.model_type", name))


@pytest.mark.parametrize("mark", ["rotation", "codebook", "fuse_rotations"])
def test_rotated_codebooks_are_refused(mark: str) -> None:
    block = width(**{mark: "hadamard"})
    with pytest.raises(ForeignCheckpointError, match=rf"turboquant .*{mark} is set"):
        ModelArgs.from_dict(changed(graded_config(), "top.quantization", block))
