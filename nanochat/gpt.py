"""The GPT model.

Rotary positions, normed queries and keys, relu^2 MLPs, no biases and no norm weights, untied embedding and head, value
embeddings on every second layer, a smear that mixes the previous token in, a backout of the middle layer, soft-capped
logits. Build it on the meta device, then `.to_empty(device=...)`, then `.init_weights()`.
"""

from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanochat import common
from nanochat.engine import sample_next
from nanochat.flash_attention import flash_attn
from nanochat.optim import MuonAdamW


@dataclass
class GPTConfig:
    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6  # query heads
    n_kv_head: int = 6  # key and value heads; n_head is a multiple of it
    n_embd: int = 768
    window_pattern: str = "SSSL"  # L full, S a quarter of the context; tiled over the layers, the last is always L


def norm(x):
    """Root mean square norm over the last dim, without weights."""
    return F.rms_norm(x, (x.size(-1),))


class Linear(nn.Linear):
    """A matrix without bias, kept in fp32 for the optimizer and cast to the input's dtype for the product."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def has_ve(layer_idx, n_layer):
    """Whether a layer has value embeddings: every second one, the last always."""
    return layer_idx % 2 == (n_layer - 1) % 2


def apply_rotary_emb(x, cos, sin):
    """Rotate x (B, T, H, D), whose halves are the two coordinates, by the angles of cos and sin (1, T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x1 * (-sin) + x2 * cos], dim=-1)


class CausalSelfAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx
        self.n_head = config.n_head
        self.n_kv_head = config.n_kv_head
        self.n_embd = config.n_embd
        if config.n_embd % config.n_head or config.n_head % config.n_kv_head:
            raise ValueError(
                f"n_embd {config.n_embd}, n_head {config.n_head} and n_kv_head {config.n_kv_head} do not fit: "
                "n_embd must be a multiple of n_head, and n_head of n_kv_head."
            )
        self.head_dim = config.n_embd // config.n_head
        self.ve_gate_channels = 12
        self.c_q = Linear(self.n_embd, self.n_head * self.head_dim)
        self.c_k = Linear(self.n_embd, self.n_kv_head * self.head_dim)
        self.c_v = Linear(self.n_embd, self.n_kv_head * self.head_dim)
        self.c_proj = Linear(self.n_embd, self.n_embd)
        self.ve_gate = Linear(self.ve_gate_channels, self.n_kv_head) if has_ve(layer_idx, config.n_layer) else None

    def forward(self, x, ve, cos_sin, window_size, kv_cache):
        """x (B, T, C), ve (B, T, n_kv_head * head_dim) or None -> (B, T, C)."""
        B, T, _ = x.shape
        q_BTHD = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k_BTHD = self.c_k(x).view(B, T, self.n_kv_head, self.head_dim)
        v_BTHD = self.c_v(x).view(B, T, self.n_kv_head, self.head_dim)
        if ve is not None:
            gate_BTH = 3 * torch.sigmoid(self.ve_gate(x[..., : self.ve_gate_channels]))
            v_BTHD = v_BTHD + gate_BTH.unsqueeze(-1) * ve.view(B, T, self.n_kv_head, self.head_dim)
        cos, sin = cos_sin
        # Unit queries and keys bound the scores; 1.2 on each side lets the softmax get sharper again.
        q_BTHD = norm(apply_rotary_emb(q_BTHD, cos, sin)) * 1.2
        k_BTHD = norm(apply_rotary_emb(k_BTHD, cos, sin)) * 1.2
        if kv_cache is None:
            y = flash_attn.flash_attn_func(q_BTHD, k_BTHD, v_BTHD, causal=True, window_size=window_size)
        else:
            held = kv_cache.get_layer_cache(self.layer_idx)
            y = flash_attn.flash_attn_with_kvcache(
                q_BTHD, *held, k=k_BTHD, v=v_BTHD, cache_seqlens=kv_cache.cache_seqlens,
                causal=True, window_size=window_size,
            )  # fmt: skip
            if self.layer_idx == kv_cache.n_layers - 1:  # every layer writes at the same position
                kv_cache.advance(T)
        return self.c_proj(y.contiguous().view(B, T, -1))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.attn = CausalSelfAttention(config, layer_idx)
        self.mlp = MLP(config)

    def forward(self, x, ve, cos_sin, window_size, kv_cache):
        x = self.attn(norm(x), ve, cos_sin, window_size, kv_cache) + x
        return x + self.mlp(norm(x))


class GPT(nn.Module):
    def __init__(self, config, pad_vocab_size_to=64):
        """`pad_vocab_size_to`: embedding and head have this multiple of rows, for even kernels and even shards."""
        super().__init__()
        self.config = config
        self.window_sizes = self._compute_window_sizes(config)
        padded_vocab = -(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(padded_vocab, config.n_embd),
                "h": nn.ModuleList([Block(config, i) for i in range(config.n_layer)]),
            }
        )
        self.lm_head = Linear(config.n_embd, padded_vocab)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))  # scale the residual stream before each layer
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))  # mix the first embedding back in
        self.smear_gate = Linear(24, 1)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        head_dim = config.n_embd // config.n_head
        self.value_embeds = nn.ModuleDict(
            {
                str(i): nn.Embedding(padded_vocab, config.n_kv_head * head_dim)
                for i in range(config.n_layer)
                if has_ve(i, config.n_layer)
            }
        )
        # Ten times the training context, so that generation may run past it.
        self.rotary_seq_len = 10 * config.sequence_len
        cos, sin = self._precompute_rotary_embeddings(self.rotary_seq_len, head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    @torch.no_grad()
    def init_weights(self):
        """Set every parameter and buffer. The order of the draws is fixed: equal seeds give equal models."""
        s = 3**0.5 * self.config.n_embd**-0.5  # U(-s, s) has standard deviation 1/sqrt(n_embd)
        blocks = self.transformer.h
        for table in (self.transformer.wte, *self.value_embeds.values()):
            table.float()  # draws are fp32 also where the tables were cast before
        nn.init.normal_(self.transformer.wte.weight, mean=0.0, std=0.8)
        nn.init.normal_(self.lm_head.weight, mean=0.0, std=0.001)
        for block in blocks:
            nn.init.uniform_(block.attn.c_q.weight, -s, s)
            nn.init.uniform_(block.attn.c_k.weight, -s, s)
            nn.init.uniform_(block.attn.c_v.weight, -s, s)
            nn.init.zeros_(block.attn.c_proj.weight)  # every block starts as the identity
            nn.init.uniform_(block.mlp.c_fc.weight, -0.4 * s, 0.4 * s)
            nn.init.zeros_(block.mlp.c_proj.weight)
        nn.init.uniform_(self.smear_gate.weight, 0.0, 0.02)
        for table in self.value_embeds.values():
            nn.init.uniform_(table.weight, -s, s)
        for block in blocks:
            if block.attn.ve_gate is not None:
                nn.init.uniform_(block.attn.ve_gate.weight, 0.0, 0.02)
        n = self.config.n_layer
        for i in range(n):
            self.resid_lambdas[i] = 1.15 - 0.10 * i / max(n - 1, 1)
            self.x0_lambdas[i] = 0.20 - 0.15 * i / max(n - 1, 1)
        self.smear_lambda.fill_(0.0)
        self.backout_lambda.fill_(0.2)
        self.cos, self.sin = self._precompute_rotary_embeddings(
            self.rotary_seq_len, self.config.n_embd // self.config.n_head, device=self.get_device()
        )
        if common.COMPUTE_DTYPE is not torch.float16:  # fp16 gradients cannot be unscaled
            for table in (self.transformer.wte, *self.value_embeds.values()):
                table.to(dtype=common.COMPUTE_DTYPE)

    def _precompute_rotary_embeddings(self, seq_len, head_dim, base=100000, device=None):
        """cos and sin (1, seq_len, 1, head_dim/2) in COMPUTE_DTYPE; pair i turns by base^(-2i/head_dim) a position."""
        channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
        inv_freq = 1.0 / (base ** (channels / head_dim))
        angles = torch.outer(torch.arange(seq_len, dtype=torch.float32, device=device), inv_freq)
        cos, sin = angles.cos().to(common.COMPUTE_DTYPE), angles.sin().to(common.COMPUTE_DTYPE)
        return cos[None, :, None, :], sin[None, :, None, :]

    def _compute_window_sizes(self, config):
        """One (left, right) window per layer, in keys. Raises ValueError for letters other than S and L."""
        pattern = config.window_pattern.upper()
        if not pattern or set(pattern) - set("SL"):
            raise ValueError(f"window_pattern is {config.window_pattern!r}: expected S (short) and L (full) only.")
        short = 128 * -(-config.sequence_len // 512)  # a quarter of the context, in whole blocks of 128
        sizes = {"L": (config.sequence_len, 0), "S": (short, 0)}
        windows = [sizes[pattern[i % len(pattern)]] for i in range(config.n_layer)]
        windows[-1] = sizes["L"]
        return windows

    def get_device(self):
        return self.transformer.wte.weight.device

    def num_matmul_params(self):
        """How many parameters sit in matrices that every token is multiplied with (so no embeddings)."""
        return sum(m.weight.numel() for m in self.modules() if isinstance(m, nn.Linear))

    def _keys_read(self, context_len):
        """Keys that the last of `context_len` tokens attends to, summed over the layers."""
        return sum(min(left, context_len) for left, _ in self.window_sizes)

    def estimate_flops(self):
        """Training FLOPs per token: 6 per matrix parameter, 12 per attended channel (PaLM, arXiv 2204.02311)."""
        return 6 * self.num_matmul_params() + 12 * self.config.n_embd * self._keys_read(self.config.sequence_len)

    def estimate_decode_flops(self, context_len):
        """FLOPs of one decoded token that sees `context_len` keys, itself included."""
        return 2 * self.num_matmul_params() + 4 * self.config.n_embd * self._keys_read(context_len)

    def estimate_prefill_flops(self, num_tokens):
        """FLOPs of a prompt: the sum of estimate_decode_flops over contexts 1 to `num_tokens`."""
        keys = 0
        for left, _ in self.window_sizes:
            w = min(left, num_tokens)
            keys += w * (w + 1) // 2 + (num_tokens - w) * w
        return 2 * self.num_matmul_params() * num_tokens + 4 * self.config.n_embd * keys

    def kv_bytes_per_token(self):
        """Bytes that one position takes in the KV cache, over all layers."""
        return self.config.n_layer * self._kv_bytes_per_layer()

    def kv_read_bytes(self, context_len):
        """Bytes of KV cache that decoding one token at `context_len` keys reads."""
        return self._kv_bytes_per_layer() * self._keys_read(context_len)

    def _kv_bytes_per_layer(self):
        head_dim = self.config.n_embd // self.config.n_head
        return 2 * self.config.n_kv_head * head_dim * common.COMPUTE_DTYPE.itemsize

    def num_scaling_params(self):
        """Parameter counts by role, as scaling laws want them told apart, and their `total`."""
        scalars = self.resid_lambdas, self.x0_lambdas, self.smear_gate.weight, self.smear_lambda, self.backout_lambda
        counts = {
            "wte": self.transformer.wte.weight.numel(),
            "value_embeds": sum(p.numel() for p in self.value_embeds.parameters()),
            "lm_head": self.lm_head.weight.numel(),
            "transformer_matrices": sum(p.numel() for p in self.transformer.h.parameters()),
            "scalars": sum(p.numel() for p in scalars),
        }
        return {**counts, "total": sum(counts.values())}

    def setup_optimizer(self, unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, weight_decay=0.0, scalar_lr=0.5):
        """MuonAdamW over all parameters: Muon for the blocks' matrices, AdamW for the rest.

        The AdamW rates of embeddings and head were tuned at 768 channels and scale by 1/sqrt(n_embd / 768).
        `weight_decay` is the matrices'. Each group keeps its `initial_lr`, for schedules to multiply.
        """
        scale = (self.config.n_embd / 768) ** -0.5

        def adamw(params, lr, betas, decay):
            return dict(kind="adamw", params=list(params), lr=lr, betas=betas, eps=1e-10, weight_decay=decay)

        smear = [self.smear_gate.weight, self.smear_lambda, self.backout_lambda]
        groups = [
            adamw(self.lm_head.parameters(), unembedding_lr * scale, (0.8, 0.96), 0.01),
            adamw(self.transformer.wte.parameters(), embedding_lr * scale, (0.8, 0.995), 0.001),
            adamw(self.value_embeds.parameters(), embedding_lr * scale * 0.5, (0.8, 0.995), 0.01),
            adamw([self.resid_lambdas], scalar_lr * 0.01, (0.8, 0.95), 0.05),
            adamw([self.x0_lambdas], scalar_lr, (0.96, 0.95), 0.0),
            adamw(smear, 0.2, (0.8, 0.95), 0.0),
        ]
        matrices = list(self.transformer.h.parameters())
        for shape in sorted({tuple(p.shape) for p in matrices}):
            same = [p for p in matrices if tuple(p.shape) == shape]
            muon = dict(kind="muon", params=same, lr=matrix_lr, momentum=0.95, ns_steps=5, beta2=0.9)
            groups.append({**muon, "weight_decay": weight_decay})
        assert sum(len(group["params"]) for group in groups) == len(list(self.parameters())), "a parameter has no group"
        for group in groups:
            group["initial_lr"] = group["lr"]
        return MuonAdamW(groups)

    def _smear(self, x, kv_cache):
        """Add to each token (B, T, C) a gated share of the one before it, as that was before its own smear."""
        if kv_cache is not None:
            before = kv_cache.prev_embedding
            kv_cache.prev_embedding = x[:, -1:]
            if before is not None:
                x = torch.cat([before, x], dim=1)
                return self._smear(x, None)[:, 1:]
        # The first token of a text has none before it.
        gate = torch.sigmoid(self.smear_gate(x[:, 1:, :24])) * self.smear_lambda.to(x.dtype)
        return torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        """Logits (B, T, vocab_size) in fp32 for tokens idx (B, T), or with `targets` (B, T) the cross-entropy in nats.

        Targets of -1 do not count. `loss_reduction` "mean" or "sum" gives a scalar, "none" the losses as (B*T,).
        With a KV cache idx continues what the cache holds. Without one T must be at least 2.
        """
        T = idx.size(1)
        start = 0 if kv_cache is None else kv_cache.get_pos()
        assert kv_cache is not None or T > 1, "A forward pass without a KV cache needs at least 2 tokens per row."
        if kv_cache is not None and start + T > kv_cache.max_seq_len:
            raise ValueError(
                f"{T} tokens at position {start} do not fit into a KV cache of {kv_cache.max_seq_len}: make it longer."
            )
        if start + T > self.cos.size(1):
            raise ValueError(f"Position {start + T} is past the {self.cos.size(1)} that rotary embeddings exist for.")
        if self.cos.dtype != common.COMPUTE_DTYPE:
            raise RuntimeError(
                f"The model was initialised for {self.cos.dtype} but this run computes in {common.COMPUTE_DTYPE}: "
                "call compute_init() first, then build the model."
            )
        cos_sin = self.cos[:, start : start + T], self.sin[:, start : start + T]
        x = norm(self.transformer.wte(idx).to(common.COMPUTE_DTYPE))
        x = self._smear(x, kv_cache)
        x0, middle = x, None
        for i, block in enumerate(self.transformer.h):
            x = self.x0_lambdas[i] * x0 + self.resid_lambdas[i] * x
            values = self.value_embeds[str(i)](idx).to(x.dtype) if has_ve(i, self.config.n_layer) else None
            x = block(x, values, cos_sin, self.window_sizes[i], kv_cache)
            if i == self.config.n_layer // 2:
                middle = x
        x = norm(x - self.backout_lambda.to(x.dtype) * middle)
        logits = self.lm_head(x)[..., : self.config.vocab_size].float()
        logits = 15 * torch.tanh(logits / 15)  # smoothly bounded to (-15, 15)
        if targets is None:
            return logits
        return F.cross_entropy(
            logits.view(-1, logits.size(-1)), targets.reshape(-1), ignore_index=-1, reduction=loss_reduction
        )

    @torch.inference_mode()
    def generate(self, tokens, max_tokens, temperature=1.0, top_k=None, seed=42):
        """Yield up to `max_tokens` sampled token ids (ints) after the list `tokens`, one row, without a cache.

        `temperature` 0 takes the likeliest token. `top_k` keeps that many candidates.
        """
        assert isinstance(tokens, list), "tokens must be a list of token ids"
        device = self.get_device()
        generator = torch.Generator(device=device).manual_seed(seed)
        idx = torch.tensor([tokens], dtype=torch.long, device=device)
        for _ in range(max_tokens):
            token = sample_next(self(idx)[:, -1], generator, temperature, top_k)
            idx = torch.cat([idx, token[:, None]], dim=1)
            yield int(token)
