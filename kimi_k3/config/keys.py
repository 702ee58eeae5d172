"""The keys of ``text_config``, in three lists: required, defaulted and inert.

``docs/checkpoints.md`` shows these tables; a test keeps the two in step.
"""

from typing import Any

#: Keys that decide what the model computes and have no safe default.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "rms_norm_eps",
    "hidden_act",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "linear_attn_config",
    "attn_res_block_size",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mla_use_nope",
    "mla_use_output_gate",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "first_k_dense_replace",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
)

#: Required keys whose value may be null: the part they size is then left out.
NULLABLE = (
    "activation_situ_linear_beta",  # the up half is not squashed
    "attn_res_block_size",  # plain residual additions
    "q_lora_rank",  # one full query projection
    "routed_expert_hidden_size",  # experts work on the hidden state itself
)

#: Keys that may be left out (or null), and what is then assumed.
DEFAULTS: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_key_value_heads": None,  # equal to num_attention_heads: MLA has no groups
    "max_position_embeddings": 1048576,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "norm_type": "rmsnorm",
    "expert_counts": None,  # num_experts in every MoE layer
    "expert_bank_split": None,  # one bank in every layer
    "expert_top_p": None,  # every chosen expert runs
    "attention_block_bytes": 2**26,  # scores that MLA computes at a time in a prompt
}

#: Those of :data:`DEFAULTS` that a user chooses for any checkpoint.
OPTIONS = ("expert_top_p", "attention_block_bytes")

#: The same for ``text_config.linear_attn_config``.
LINEAR_REQUIRED = (
    "kda_layers",
    "full_attn_layers",
    "num_heads",
    "head_dim",
    "short_conv_kernel_size",
    "use_full_rank_gate",
)

LINEAR_DEFAULTS: dict[str, Any] = {
    "gate_lower_bound": None,  # the softplus gate of Kimi-Linear
}

#: Values for which there is code; anything else is refused.
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("situ",),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "mla_use_nope": (True,),
    "num_nextn_predict_layers": (0, None),
    "norm_type": ("rmsnorm",),
}

#: Hugging Face boilerplate and what host libraries inject. Changes nothing here.
INERT = frozenset(
    [
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "conversion",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "ignore_index",
        "image_placeholder",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "max_length",
        "media_placeholder_token_id",
        "min_length",
        "model_max_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "problem_type",
        "pruned_heads",
        "quantization",
        "quantization_config",
        "quantize_activations",
        "reap",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "use_bfloat16",
        "use_cache",
        "vision_config",
    ]
)
