"""The nanos' model in torch, for training only.

Written from the formulas in Moonshot's report of Kimi K3, in a form that trains fast on
a CPU: the delta rule in chunks, pairs of token and expert sorted by expert.
``export.py`` turns the parameters into a source checkpoint, and the package's own model
gives the same logits.
"""

import torch
import torch.nn.functional as F
from settings import LINEAR, TEXT
from torch import Tensor, nn

EPS = 1e-5
GATE_LOWER_BOUND = -5.0
BETA, LINEAR_BETA = 4.0, 25.0
CHUNK = 16

HIDDEN = TEXT["hidden_size"]
HEADS, HEAD = LINEAR["num_heads"], LINEAR["head_dim"]
EXPERTS, TOP_K = TEXT["num_experts"], TEXT["num_experts_per_token"]
LATENT, INNER = TEXT["routed_expert_hidden_size"], TEXT["moe_intermediate_size"]


def linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=inputs**-0.5)
    return layer


def situ(gate: Tensor, up: Tensor) -> Tensor:
    bounded = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
    return bounded * (LINEAR_BETA * torch.tanh(up / LINEAR_BETA))


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """The gated delta rule over (B, H, T, D), chunk by chunk; ``beta`` (B, H, T).

    Within a chunk the T sequential updates are one triangular system. Decays are taken
    relative to the chunk's middle so that no exponential overflows.
    """
    batch, heads, length, width = q.shape
    count = length // CHUNK
    q, k, v, log_decay, beta = (
        x.reshape(batch, heads, count, CHUNK, *x.shape[3:])
        for x in (q, k, v, log_decay, beta)
    )
    total = log_decay.cumsum(3)
    middle, last = total[:, :, :, CHUNK // 2, None].detach(), total[:, :, :, -1:]
    beta = beta[..., None]
    lower = torch.tril(torch.ones(CHUNK, CHUNK))
    from_middle = k * (middle - total).exp()
    strict = ((k * (total - middle).exp() * beta) @ from_middle.mT) * lower.tril(-1)
    inverse = _unit_lower_inverse(strict)
    within = ((q * (total - middle).exp()) @ from_middle.mT) * lower
    values = inverse @ (v * beta)
    keys = inverse @ (k * total.exp() * beta)
    queries, kept = q * total.exp(), (k * (last - total).exp()).mT
    decay = last.exp().mT
    state = q.new_zeros(batch, heads, width, v.shape[-1])
    outputs = []
    for n in range(count):
        update = values[:, :, n] - keys[:, :, n] @ state
        outputs.append(queries[:, :, n] @ state + within[:, :, n] @ update)
        state = state * decay[:, :, n] + kept[:, :, n] @ update
    return torch.stack(outputs, 2).reshape(batch, heads, length, -1)


def _unit_lower_inverse(strict: Tensor) -> Tensor:
    """(I + L)⁻¹ of a strictly lower triangular L of CHUNK rows, by squaring."""
    inverse = torch.eye(CHUNK) - strict
    power = strict
    for _ in range(CHUNK.bit_length() - 2):
        power = power @ power
        inverse = inverse + power @ inverse
    return inverse


class ShortConv(nn.Module):
    """A causal depthwise convolution of width 4, then SiLU."""

    def __init__(self, channels: int, width: int = 4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        width, length = self.weight.shape[1], x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        taps = (padded[:, i : i + length] * self.weight[:, i] for i in range(width))
        return F.silu(sum(taps))


class KimiDeltaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        inner = HEADS * HEAD
        self.q_proj, self.k_proj, self.v_proj = (linear(HIDDEN, inner) for _ in "qkv")
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (ShortConv(inner) for _ in "qkv")
        self.f_a_proj, self.f_b_proj = linear(HIDDEN, HEAD), linear(HEAD, inner)
        self.b_proj, self.g_proj = linear(HIDDEN, HEADS), linear(HIDDEN, inner)
        self.A_log = nn.Parameter(torch.zeros(HEADS))
        self.dt_bias = nn.Parameter(torch.empty(inner).uniform_(-6, -1.5))
        self.o_norm = nn.RMSNorm(HEAD, eps=EPS)
        self.o_proj = linear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.reshape(batch, length, HEADS, HEAD).transpose(1, 2)

        q = heads(self.q_conv1d(self.q_proj(x)))
        k = heads(self.k_conv1d(self.k_proj(x)))
        v = heads(self.v_conv1d(self.v_proj(x)))
        q = q * torch.rsqrt((q * q).sum(-1, keepdim=True) + 1e-6) * HEAD**-0.5
        k = k * torch.rsqrt((k * k).sum(-1, keepdim=True) + 1e-6)
        gate = heads(self.f_b_proj(self.f_a_proj(x)) + self.dt_bias)
        decay = GATE_LOWER_BOUND * torch.sigmoid(self.A_log.exp()[:, None, None] * gate)
        beta = torch.sigmoid(self.b_proj(x)).transpose(1, 2)
        out = delta_rule(q, k, v, decay, beta).transpose(1, 2)
        opened = torch.sigmoid(self.g_proj(x)).reshape(out.shape)
        return self.o_proj((self.o_norm(out) * opened).reshape(batch, length, -1))


class GatedMLA(nn.Module):
    def __init__(self):
        super().__init__()
        heads, nope, rope = HEADS, TEXT["qk_nope_head_dim"], TEXT["qk_rope_head_dim"]
        value, latent, query = (
            TEXT["v_head_dim"],
            TEXT["kv_lora_rank"],
            TEXT["q_lora_rank"],
        )
        self.sizes = nope, rope, value, latent
        self.q_a_proj = linear(HIDDEN, query)
        self.q_a_layernorm = nn.RMSNorm(query, eps=1e-6)
        self.q_b_proj = linear(query, heads * (nope + rope))
        self.kv_a_proj_with_mqa = linear(HIDDEN, latent + rope)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=1e-6)
        self.kv_b_proj = linear(latent, heads * (nope + value))
        self.g_proj = linear(HIDDEN, heads * value)
        self.o_proj = linear(heads * value, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        nope, rope, value, latent = self.sizes
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(batch, length, HEADS, nope + rope).transpose(1, 2)
        compressed, shared = self.kv_a_proj_with_mqa(x).split([latent, rope], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(compressed))
        kv = kv.reshape(batch, length, HEADS, nope + value).transpose(1, 2)
        k, v = kv.split([nope, value], -1)
        shared = shared[:, None].expand(batch, HEADS, length, rope)
        k = torch.cat([k, shared], -1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out * torch.sigmoid(self.g_proj(x)))


class MLP(nn.Module):
    def __init__(self, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = linear(HIDDEN, inner), linear(HIDDEN, inner)
        self.down_proj = linear(inner, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(situ(self.gate_proj(x), self.up_proj(x)))


class LatentMoE(nn.Module):
    """``loads`` (B, EXPERTS): how often each row chose each expert in the last pass."""

    def __init__(self):
        super().__init__()
        self.gate = linear(HIDDEN, EXPERTS)
        nn.init.normal_(self.gate.weight, std=0.5 * HIDDEN**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INNER, LATENT) * LATENT**-0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, INNER, LATENT) * LATENT**-0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, LATENT, INNER) * INNER**-0.5)
        self.routed_expert_down_proj = linear(HIDDEN, LATENT)
        self.routed_expert_norm = nn.RMSNorm(LATENT, eps=EPS)
        self.routed_expert_up_proj = linear(LATENT, HIDDEN)
        self.shared_experts = MLP(INNER * TEXT["num_shared_experts"])
        self.loads = torch.zeros(1, EXPERTS)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, HIDDEN)
        scores = torch.sigmoid(self.gate(flat))
        chosen = (scores + self.e_score_correction_bias).detach().topk(TOP_K).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        picks = F.one_hot(chosen.reshape(len(x), -1), EXPERTS)
        self.loads = picks.sum(1).float()
        out = self._experts(self.routed_expert_down_proj(flat), chosen)
        routed = self.routed_expert_norm((out * weights[..., None]).sum(1))
        routed = self.routed_expert_up_proj(routed)
        return (routed + self.shared_experts(flat)).view(x.shape)

    def _experts(self, latent: Tensor, chosen: Tensor) -> Tensor:
        """Each token through its experts, (N, K, LATENT): sorted, one slice an expert."""
        pairs = chosen.reshape(-1)
        order = pairs.argsort(stable=True)
        counts = torch.bincount(pairs, minlength=EXPERTS)
        sizes = counts.tolist()
        rows = latent.index_select(0, order // TOP_K)
        hidden = situ(_each(rows, self.w1, sizes), _each(rows, self.w3, sizes))
        out = _each(hidden, self.w2, sizes)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return out.index_select(0, back).view(*chosen.shape, LATENT)


def _each(rows: Tensor, matrices: Tensor, sizes: list[int]) -> Tensor:
    """Consecutive slices of ``rows`` of the given sizes, each times its own matrix."""
    parts = zip(rows.split(sizes), matrices, strict=True)
    return torch.cat([part @ matrix.T for part, matrix in parts])


class Mix(nn.Module):
    """The weighted mean of the stored blocks and the running sum (Attention Residuals)."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.proj = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, blocks: list[Tensor], prefix: Tensor) -> Tensor:
        if not blocks:
            return prefix
        candidates = torch.stack([*blocks, prefix])
        size = torch.rsqrt((candidates * candidates).mean(-1) + EPS)
        scores = (candidates @ (self.norm * self.proj)) * size
        return (scores.softmax(0)[..., None] * candidates).sum(0)


class Layer(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        is_kda = index + 1 in LINEAR["kda_layers"]
        self.self_attn = KimiDeltaAttention() if is_kda else GatedMLA()
        self.mlp = LatentMoE() if index else MLP(TEXT["intermediate_size"])
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.self_attention_res, self.mlp_res = Mix(), Mix()
        self.starts_block = index % TEXT["attn_res_block_size"] == 0

    def forward(
        self, blocks: list[Tensor], prefix: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        x = self.self_attention_res(blocks, prefix)
        attended = self.self_attn(self.input_layernorm(x))
        if self.starts_block:
            blocks, prefix = [*blocks, prefix], attended
        else:
            prefix = prefix + attended
        x = self.post_attention_layernorm(self.mlp_res(blocks, prefix))
        return blocks, prefix + self.mlp(x)


class Nano(nn.Module):
    """Token ids (B, T) → logits (B, T, vocab); T is a multiple of CHUNK."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(TEXT["vocab_size"], HIDDEN)
        self.layers = nn.ModuleList(Layer(i) for i in range(TEXT["num_hidden_layers"]))
        self.output_attn_res = Mix()
        self.norm = nn.RMSNorm(HIDDEN, eps=EPS)
        self.lm_head = linear(HIDDEN, TEXT["vocab_size"])
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        nn.init.normal_(self.lm_head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        blocks: list[Tensor] = []
        prefix = self.embed_tokens(tokens)
        for layer in self.layers:
            blocks, prefix = layer(blocks, prefix)
        return self.lm_head(self.norm(self.output_attn_res(blocks, prefix)))

    def moe_layers(self) -> list[LatentMoE]:
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, LatentMoE)]
