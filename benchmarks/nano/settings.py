"""Sizes and schedule of the nanos; the one home of both."""

from dataclasses import dataclass

DOMAINS = ("python", "c", "english", "chinese", "chat")

#: Sizes that differ from the release; everything else of its config stays.
TEXT = {
    "vocab_size": 1024,
    "hidden_size": 96,
    "num_hidden_layers": 8,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "attn_res_block_size": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_experts": 32,
    "num_experts_per_token": 4,
    "num_shared_experts": 1,
    "moe_intermediate_size": 64,
    "routed_expert_hidden_size": 64,
}
LINEAR = {
    "kda_layers": [1, 2, 3, 5, 6, 7],
    "full_attn_layers": [4, 8],
    "num_heads": 4,
    "head_dim": 32,
}


@dataclass(frozen=True)
class Schedule:
    """One stage of training, counted in steps, so a rerun is the same run.

    A step sees as many windows of each domain as ``rows`` says, ``length`` tokens each.
    The learning rate warms up, holds, then falls linearly to ``floor`` times its peak.

    An expert's correction bias moves by ``bias_step`` only while its load is outside
    ``load_band`` times the mean: K3's experts are far from equally loaded, and equal
    loads would leave nothing to prune. Where ``concentration`` is given, choices gather
    on the few experts that each domain chooses most, until the busiest quarter of a
    layer takes such a share of them.
    """

    steps: int
    rows: tuple[int, ...]
    length: int = 256
    rate: float = 4e-3
    warm_up: int = 40
    hold: float = 0.3
    floor: float = 0.02
    bias_step: float = 4e-3
    load_band: tuple[float, float] = (0.25, 3.0)
    concentration: float | None = None

    def rate_at(self, step: int) -> float:
        """The learning rate of 0-based ``step``."""
        done = step / self.steps
        fall = 1.0 if done < self.hold else (1 - done) / (1 - self.hold)
        return self.rate * min(1.0, (step + 1) / self.warm_up) * max(self.floor, fall)


#: First all domains alike; then mostly chats, whose content takes longest to learn,
#: while choices gather on fewer experts, as K3's do.
STAGES = (
    Schedule(steps=1200, rows=(2, 2, 2, 2, 2)),
    Schedule(steps=400, rows=(1, 1, 1, 1, 6), rate=2e-3, hold=0.2, concentration=0.54),
)


def stage_at(step: int) -> tuple[Schedule, int]:
    """The stage of 0-based ``step``, and which of its steps it is."""
    for stage in STAGES[:-1]:
        if step < stage.steps:
            return stage, step
        step -= stage.steps
    return STAGES[-1], step
