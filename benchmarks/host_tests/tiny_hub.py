"""Tiny random models in a hub cache, in place of the one that mlx-lm's tests load.

The tests ask for ``mlx-community/Qwen1.5-0.5B-Chat-4bit``. Written as a snapshot of that
name, with the hub offline, mlx-lm's own ``load``, ``convert`` and ``hf_repo_to_path``
find it with nothing of mlx-lm patched. It is a Qwen2 or, to put our class under the same
tests, a Kimi K3; both speak ChatML with one tokenizer.
"""

import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen2
from mlx_lm.utils import quantize_model, save_config, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

REPOSITORY = "mlx-community/Qwen1.5-0.5B-Chat-4bit"
REVISION = "0" * 40

#: 4-bit groups and a quantised KV cache want multiples of 64, heads of 64 included.
QWEN2_SIZES = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}

#: Changes to the tests' T0: five layers, 16 experts, widths that 4-bit groups divide.
K3_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}

VOCAB_SIZE = 512

#: Factor on a random head, so that sampling at low temperature is as good as settled:
#: flat logits would let the last bits of a cached prompt change the sampled text.
HEAD_SCALE = 8.0

MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    "{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

#: Text from which the tokenizer learns its merges.
TEXT = (
    "You are a helpful assistant. Write a story about Einstein. What time is it? ",
    "Once upon a time there was a very small model that said hello to the world. ",
    "How tall is Mt Everest? Say nothing else. Hi! Tell me a story about dragons. ",
)


def write_hub_cache(hub: Path, model_type: str) -> Path:
    """Write model and tokenizer as a snapshot under ``hub``; returns its folder.

    ``model_type`` is ``qwen2`` or ``kimi_k3``.
    """
    repository = hub / f"models--{REPOSITORY.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    mx.random.seed(0)
    model, head, config = {"qwen2": random_qwen2, "kimi_k3": random_k3}[model_type]()
    head.weight = HEAD_SCALE * head.weight
    write_model(snapshot, model, config)
    write_tokenizer(snapshot)
    # What mlx-lm's converter starts its own model card from.
    (snapshot / "README.md").write_text("---\nlanguage: en\n---\n")
    return snapshot


def random_qwen2() -> tuple[Any, Any, dict[str, Any]]:
    """A Qwen2 of :data:`QWEN2_SIZES`, its head, and its configuration."""
    config = {"model_type": "qwen2", "vocab_size": VOCAB_SIZE, **QWEN2_SIZES}
    model = qwen2.Model(qwen2.ModelArgs.from_dict(config))
    return model, model.lm_head, config


def random_k3() -> tuple[Any, Any, dict[str, Any]]:
    """The tests' T0 with :data:`K3_SIZES`, its head, and its configuration."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
    from tiny_k3 import t0_config, t0_model

    sizes = K3_SIZES | {"vocab_size": VOCAB_SIZE}
    model, config = t0_model(**sizes), t0_config(**sizes)
    return model, model.language_model.lm_head, config


def write_model(folder: Path, model: Any, config: dict[str, Any]) -> None:
    """Write ``model`` into ``folder``, its linear layers in 4 bits, groups of 64."""
    model.set_dtype(mx.float16)
    config["eos_token_id"] = learned_size() + MARKERS.index("<|im_end|>")
    model, config = quantize_model(model, config, group_size=64, bits=4)
    save_model(folder, model)
    save_config(config, folder / "config.json")


def learned_size() -> int:
    """Tokens of the vocabulary below the markers."""
    return VOCAB_SIZE - len(MARKERS)


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE whose vocabulary is exactly the model's, with ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=learned_size(),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    learned = tokenizer.get_vocab_size()
    fill = [f"<unused{i}>" for i in range(learned_size() - learned)]
    tokenizer.add_tokens(fill)
    tokenizer.add_special_tokens([AddedToken(m, special=True) for m in MARKERS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
