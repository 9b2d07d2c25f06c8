"""Faults of attention, its choice of a kernel, and the KV cache."""

from tests.faults.edit import Edit, Fault

ATTENTION = "nanochat/flash_attention.py"
ENGINE = "nanochat/engine.py"
GPT = "nanochat/gpt.py"

FITS = "HAS_FA3 and all(t.is_cuda and t.dtype == torch.bfloat16 for t in tensors)"
CROP = "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)"

FAULTS = [
    # Which kernel.
    Fault(
        "dispatch-by-machine",
        "As stock: what the machine has decides, not the tensors, and a CPU run beside a GPU goes to a CUDA kernel.",
        Edit(ATTENTION, "_resolve_use_fa3", FITS, "HAS_FA3 and torch.cuda.is_available()"),
        ids=("ATT-01", "ATT-05"),
    ),
    Fault(
        "dispatch-by-machine-without-a-switch",
        "As stock: a CPU run beside a GPU goes to a CUDA kernel and nothing keeps it away.",
        Edit(ATTENTION, "_resolve_use_fa3", FITS, "HAS_FA3 and torch.cuda.is_available()"),
        Edit(ATTENTION, "_sdpa_is_forced", 'os.environ.get("NANOCHAT_FORCE_SDPA", "")', '""'),
        ids=("ATT-01", "ATT-02", "ATT-03"),
    ),
    Fault(
        "switch-in-lower-case-only",
        "NANOCHAT_FORCE_SDPA=True is ignored.",
        Edit(
            ATTENTION,
            "_sdpa_is_forced",
            'os.environ.get("NANOCHAT_FORCE_SDPA", "").strip().lower()',
            'os.environ.get("NANOCHAT_FORCE_SDPA", "").strip()',
        ),
        ids=("ATT-03",),
    ),
    Fault(
        "kernel-for-any-dtype",
        "A run in fp32 on a GPU stops at its first attention.",
        Edit(ATTENTION, "_resolve_use_fa3", FITS, "HAS_FA3 and all(t.is_cuda for t in tensors)"),
        ids=("ATT-04", "ATT-05"),
    ),
    Fault(
        "kernel-for-newer-gpus-too",
        "A kernel built for Hopper is called on GPUs that it has no code for.",
        Edit(
            ATTENTION,
            "_load_flash_attention_3",
            "torch.cuda.get_device_capability()[0] != 9",
            "torch.cuda.get_device_capability()[0] < 9",
        ),
        ids=("ATT-22",),
    ),
    Fault(
        "kernel-for-every-older-gpu",
        "A run on a GPU from before Ampere stops at its first attention, in a kernel with no code for it.",
        Edit(
            ATTENTION,
            "_load_flash_attention_3",
            "torch.cuda.get_device_capability()[0] != 9",
            "torch.cuda.get_device_capability()[0] > 9",
        ),
        Edit(ATTENTION, "_resolve_use_fa3", "t.is_cuda and t.dtype == torch.bfloat16", "t.is_cuda"),
        ids=("ATT-06",),
    ),
    Fault(
        "kernel-not-told-the-window",
        "On a GPU every layer attends to the whole context, and a CPU run gives other logits.",
        Edit(
            ATTENTION,
            "flash_attn_func",
            "_fa3.flash_attn_func(q, k, v, causal=causal, window_size=window_size)",
            "_fa3.flash_attn_func(q, k, v, causal=causal)",
        ),
        ids=("ATT-07",),
    ),
    # Which keys.
    Fault(
        "window-off-by-one",
        "A sliding window reaches one key too far back, so a model trained here differs from one trained with FA3.",
        Edit(ATTENTION, "_sdpa", "key >= at - left", "key >= at - left - 1"),
        ids=("ATT-08",),
    ),
    Fault(
        "window-excludes-its-last-key",
        "A sliding window is one key too short.",
        Edit(ATTENTION, "_sdpa", "key >= at - left", "key > at - left"),
        ids=("ATT-08",),
    ),
    Fault(
        "window-ignored",
        "Every layer attends to the whole context.",
        Edit(ATTENTION, "_sdpa", "left, right = window_size", "left, right = -1, window_size[1]"),
        ids=("ATT-08", "ATT-14"),
    ),
    Fault(
        "window-ignored-for-one-query",
        "As stock once did: a token sampled with the cache sees keys that it did not see in training.",
        Edit(
            ATTENTION,
            "_sdpa",
            "left, right = window_size",
            "left, right = window_size if q.size(1) > 1 else (-1, window_size[1])",
        ),
        ids=("ATT-14", "ATT-19"),
    ),
    Fault(
        "sees-the-next-key-in-a-window",
        "Where a window is at work each query also sees the token it is to predict: a splendid loss, worth nothing.",
        Edit(ATTENTION, "_sdpa", "key <= at + right", "key <= at + right + 1"),
        ids=("ATT-08",),
    ),
    Fault(
        "not-causal-without-a-window",
        "Full layers see the whole text, so the loss falls to nothing and the model cannot write.",
        Edit(
            ATTENTION,
            "_sdpa",
            "F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)",
            "F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)",
        ),
        ids=("ATT-08", "ATT-18"),
    ),
    Fault(
        "model-asks-for-no-causality",
        "The model does not ask attention to be causal.",
        Edit(
            GPT,
            "CausalSelfAttention.forward",
            "flash_attn.flash_attn_func(q_BTHD, k_BTHD, v_BTHD, causal=True, window_size=window_size)",
            "flash_attn.flash_attn_func(q_BTHD, k_BTHD, v_BTHD, window_size=(window_size[0], -1))",
        ),
        ids=("ATT-18",),
    ),
    Fault(
        "queries-aligned-to-the-first-key",
        "With a cache, queries stand at the beginning of the keys and see the wrong ones.",
        Edit(ATTENTION, "_sdpa", "first = Tk - Tq", "first = 0"),
        ids=("ATT-10", "ATT-14"),
    ),
    Fault(
        "chunks-aligned-to-the-first-key",
        "A prompt fed in chunks is right in its first chunk and in single tokens only.",
        Edit(ATTENTION, "_sdpa", "first = Tk - Tq", "first = Tk - Tq if Tq == 1 else 0"),
        ids=("ATT-16", "ATT-20"),
    ),
    Fault(
        "always-causal",
        "The causal flag cannot be cleared.",
        Edit(ATTENTION, "_sdpa", "if causal:\n    right = 0", "right = 0"),
        ids=("ATT-11",),
    ),
    # What is made of them.
    Fault(
        "query-heads-dealt-by-modulo",
        "Query head h reads k/v head h % Hkv: a model from elsewhere gives nonsense, one trained here learns anyway.",
        Edit(
            ATTENTION,
            "_sdpa",
            CROP,
            CROP + "\nk, v = (t.repeat(1, q.size(1) // t.size(1), 1, 1) for t in (k, v))",
        ),
        ids=("ATT-09", "ATT-14"),
    ),
    Fault(
        "scores-scaled-twice",
        "Scores are divided by sqrt(D) twice: attention is too flat, and a little worse.",
        Edit(ATTENTION, "_sdpa", "q.transpose(1, 2)", "q.transpose(1, 2) * q.size(3) ** -0.5"),
        ids=("ATT-09",),
    ),
    Fault(
        "keys-learn-nothing",
        "The forward is right, the gradient of the keys is lost.",
        Edit(ATTENTION, "_sdpa", "k.transpose(1, 2)", "k.detach().transpose(1, 2)"),
        ids=("ATT-12",),
    ),
    Fault(
        "bf16-values-kept-in-7-bits-less",
        "In bf16 the values are rounded once more, to fp8, as if they were cached so.",
        Edit(
            ATTENTION,
            "_sdpa",
            "v.transpose(1, 2)",
            "(v.to(torch.float8_e4m3fn).to(v.dtype) if v.dtype == torch.bfloat16 else v).transpose(1, 2)",
        ),
        ids=("ATT-13",),
    ),
    # The cache.
    Fault(
        "keys-cached-one-off",
        "The keys of a prompt are cached one position late, the last of them first.",
        Edit(
            ATTENTION,
            "flash_attn_with_kvcache",
            "k_cache[row, start : start + new] = k[row]",
            "k_cache[row, start : start + new] = k[row].roll(1, dims=1)",
        ),
        ids=("ATT-14", "ATT-15"),
    ),
    Fault(
        "values-cached-at-the-end",
        "New values go to the end of the cache, where nobody looks.",
        Edit(
            ATTENTION,
            "flash_attn_with_kvcache",
            "v_cache[row, start : start + new] = v[row]",
            "v_cache[row, -new:] = v[row]",
        ),
        ids=("ATT-14", "ATT-15"),
    ),
    Fault(
        "rows-written-over-each-other",
        "Prompts of different length in one batch are all cached where the last of them stands.",
        Edit(
            ATTENTION,
            "flash_attn_with_kvcache",
            "k_cache[row, start : start + new] = k[row]",
            "k_cache[:, start : start + new] = k",
        ),
        ids=("ATT-17",),
    ),
    Fault(
        "newest-key-not-seen",
        "A token sampled with the cache does not see itself.",
        Edit(ATTENTION, "flash_attn_with_kvcache", "end = start + new", "end = start or new"),
        ids=("ATT-14",),
    ),
    Fault(
        "unwritten-keys-seen",
        "Queries see the whole cache, with what an earlier text left in it.",
        Edit(ATTENTION, "flash_attn_with_kvcache", "end = start + new", "end = k_cache.size(1)"),
        ids=("ATT-14",),
    ),
    Fault(
        "caller-loses-its-values",
        "The values that a caller gave to be cached are zeros afterwards.",
        Edit(
            ATTENTION,
            "flash_attn_with_kvcache",
            "return torch.cat(out) if len(out) > 1 else out[0]",
            "if new:\n    v.zero_()\nreturn torch.cat(out) if len(out) > 1 else out[0]",
        ),
        ids=("ATT-21",),
    ),
    Fault(
        "cache-advances-in-every-layer",
        "Every layer counts the new tokens, so that the next ones are cached far behind them.",
        Edit(GPT, "CausalSelfAttention.forward", "self.layer_idx == kv_cache.n_layers - 1", "True"),
        ids=("ATT-19",),
    ),
    Fault(
        "cache-advances-by-one",
        "A prompt counts as one token in the cache, and is written over as sampling goes on.",
        Edit(GPT, "CausalSelfAttention.forward", "kv_cache.advance(T)", "kv_cache.advance(1)"),
        ids=("ATT-19",),
    ),
    Fault(
        "cached-positions-start-at-0",
        "Every sampled token is rotated as if it were the first of the text.",
        Edit(
            GPT,
            "GPT.forward",
            "cos_sin = self.cos[:, start : start + T], self.sin[:, start : start + T]",
            "cos_sin = self.cos[:, :T], self.sin[:, :T]",
        ),
        ids=("ATT-19",),
    ),
    Fault(
        "prefill-one-short",
        "The last key of a prompt is not copied to the rows that are sampled from it.",
        Edit(
            ENGINE,
            "KVCache.prefill",
            "self.k_cache[:, :, :pos] = other.k_cache[:, :, :pos]",
            "self.k_cache[:, :, : pos - 1] = other.k_cache[:, :, : pos - 1]",
        ),
        ids=("ATT-19",),
    ),
    Fault(
        "prefill-forgets-the-embedding",
        "The first sampled token is not smeared with the last of the prompt.",
        Edit(ENGINE, "KVCache.prefill", "other.prev_embedding is not None", "False"),
        ids=("ATT-19",),
    ),
    Fault(
        "smears-with-the-first-of-a-call",
        "What the cache keeps for the smear is the first token of a call instead of the last.",
        Edit(GPT, "GPT._smear", "kv_cache.prev_embedding = x[:, -1:]", "kv_cache.prev_embedding = x[:, :1]"),
        ids=("ATT-19",),
    ),
    Fault(
        "smear-forgets-between-chunks",
        "As stock: the first token of each chunk of a prompt is not smeared with the one before.",
        Edit(GPT, "GPT._smear", "before is not None", "before is not None and x.size(1) == 1"),
        ids=("ATT-20",),
    ),
    Fault(
        "rotary-frequencies-in-bf16",
        "Frequencies and positions are bf16: past 256 neighbours share an angle.",
        Edit(
            GPT,
            "GPT._precompute_rotary_embeddings",
            "1.0 / (base ** (channels / head_dim))",
            "(1.0 / (base ** (channels / head_dim))).to(common.COMPUTE_DTYPE)",
        ),
        Edit(
            GPT,
            "GPT._precompute_rotary_embeddings",
            "torch.arange(seq_len, dtype=torch.float32, device=device)",
            "torch.arange(seq_len, dtype=common.COMPUTE_DTYPE, device=device)",
        ),
        ids=("ATT-23",),
    ),
    Fault(
        "rotary-angles-in-bf16",
        "cos and sin are taken of angles that bf16 has rounded.",
        Edit(GPT, "GPT._precompute_rotary_embeddings", "angles.cos()", "angles.to(common.COMPUTE_DTYPE).cos()"),
        ids=("ATT-23",),
    ),
    Fault(
        "reset-keeps-the-last-embedding",
        "After a reset the first token still gets its share of the last text's last one.",
        Edit(ENGINE, "KVCache.reset", "self.prev_embedding = None", "pass"),
        ids=("ATT-24",),
    ),
    Fault(
        "reset-keeps-the-positions",
        "After a reset new tokens are written behind those of the last text.",
        Edit(ENGINE, "KVCache.reset", "self.cache_seqlens.zero_()", "pass"),
        ids=("ATT-24",),
    ),
]
