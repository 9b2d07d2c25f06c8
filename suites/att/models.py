"""What ranks do to judge attention through the target's own model, in fp32.

Weights are drawn anew, since models start with zeroed projections behind which no fault of attention shows; and what
init_weights forgets is not attention's fault. What a model keeps in 16 bits for autocast's sake is made fp32.
"""

import inspect

import torch

from nanochat_gate import Unsupported, exact
from suites.att.calls import words

DRAWS = 8
PROMPT, TOKENS = 120, 40
LONG = dict(sequence_len=256)  # of 160 positions a short window of 128, or of half the context, hides the first ones


def randomised(rank, **config):
    """A model of the target whose every weight matters."""
    model = rank.target.model(rank.device, **config).eval()
    generator = torch.Generator().manual_seed(1)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.element_size() == 2:
                parameter.data = parameter.data.float()
            if parameter.dim() >= 2:
                scale = 1.0 if id(parameter) in tables else parameter.size(-1) ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.copy_(torch.where((parameter == 0) | parameter.isnan(), 0.5, parameter))
    return model


def tokens(rank, B, T):
    return exact.integers((B, T), 95, "tokens").abs().to(rank.device)


def logits(rank, model, idx, **kwargs):
    """(B, T, V) on the CPU, in fp64 so that differences of them are exact."""
    with torch.no_grad():
        return rank.target.logits(model, idx, **kwargs).cpu().double()


def full(rank, claimed, B, T, **config):
    """(model, tokens, their logits in one forward). UNSUPPORTED where the model can't run on a device not claimed."""
    model, idx = randomised(rank, **config), tokens(rank, B, T)
    try:
        return model, idx, logits(rank, model, idx)
    except Exception as error:
        if claimed:
            raise
        raise Unsupported(f"its model does not run in fp32 on {rank.device.type}: {words(error)}") from error


def noise(rank, model, idx, want):
    """How far roundings may move logits: the largest move over DRAWS draws in which each weight is moved by one ulp up
    or down, times the terms of the longest sum, as each weight stands for one rounding and a sum makes as many as it
    has terms."""
    generator = torch.Generator().manual_seed(2)
    kept = [p.detach().clone() for p in model.parameters()]
    largest = 0.0
    for _ in range(DRAWS):
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), kept, strict=True):
                sign = torch.randint(0, 2, weight.shape, generator=generator).to(weight.device) * 2 - 1
                parameter.copy_(weight * (1 + sign * 2.0**-23))
        largest = max(largest, float((logits(rank, model, idx) - want).abs().max()))
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), kept, strict=True):
            parameter.copy_(weight)
    terms = max(idx.size(1), *(p.size(-1) for p in model.parameters() if p.dim() >= 2))
    return {"moved": largest, "terms": terms, "bound": largest * terms}


def changed_tokens(rank, at, claimed):
    """How far logits move when one token is changed: for each changed position, the largest move at each position."""
    model, idx, want = full(rank, claimed, 1, 140, **LONG)
    moves = []
    for position in at:
        other = idx.clone()
        other[:, position] = (other[:, position] + 1) % 96
        moves.append((logits(rank, model, other) - want).abs().amax(-1)[0].tolist())
    return {"moves": moves, **noise(rank, model, idx, want)}


def new_cache(rank, model, B, T):
    if not rank.target.has("engine"):
        raise Unsupported("the target has no module engine.py with a KVCache")
    if "kv_cache" not in inspect.signature(model.forward).parameters:
        raise Unsupported("the target's model takes no kv_cache")
    config = model.config
    heads = getattr(config, "n_kv_head", config.n_head)
    sizes = dict(batch_size=B, num_heads=heads, seq_len=T, head_dim=config.n_embd // config.n_head)
    return rank.target.kv_cache(**sizes, num_layers=config.n_layer, device=rank.device, dtype=torch.float32)


def sampled(rank, claimed):
    """Logits as sampling computes them, and in one forward: a prompt in one go and in one row, its cache copied to two
    rows, then different tokens in each, one by one."""
    model, idx, _ = full(rank, claimed, 2, PROMPT + TOKENS, **LONG)
    idx[1, :PROMPT] = idx[0, :PROMPT]
    want = logits(rank, model, idx)
    cache = new_cache(rank, model, 2, PROMPT + TOKENS)
    if hasattr(cache, "prefill"):
        first = new_cache(rank, model, 1, PROMPT)
        parts = [logits(rank, model, idx[:1, :PROMPT], kv_cache=first).expand(2, -1, -1)]
        cache.prefill(first)
    else:
        parts = [logits(rank, model, idx[:, :PROMPT], kv_cache=cache)]
    for position in range(PROMPT, PROMPT + TOKENS):
        parts.append(logits(rank, model, idx[:, position : position + 1], kv_cache=cache))
    return compared(rank, model, idx, want, parts)


def chunked(rank, splits, claimed):
    """Logits of two rows fed through a cache in `splits`, and in one forward."""
    model, idx, want = full(rank, claimed, 2, sum(splits), **LONG)
    cache = new_cache(rank, model, 2, sum(splits))
    parts = [logits(rank, model, part, kv_cache=cache) for part in idx.split(splits, dim=1)]
    return compared(rank, model, idx, want, parts)


def reused(rank, claimed):
    """Logits of two rows fed through a cache that held another text and was reset, and in one forward."""
    model, idx, want = full(rank, claimed, 2, TOKENS)
    cache = new_cache(rank, model, 2, TOKENS)
    if not hasattr(cache, "reset"):
        raise Unsupported("the target's KVCache has no reset()")
    logits(rank, model, (idx + 1) % 96, kv_cache=cache)
    cache.reset()
    return compared(rank, model, idx, want, [logits(rank, model, idx, kv_cache=cache)])


def tables(rank, claimed):
    """The buffers of a model for long texts, in fp32: what it computes once, as rotary angles, and where it does."""
    model = rank.target.model(rank.device, n_layer=1, sequence_len=1024)
    held = {name: b.float().cpu() for name, b in model.named_buffers() if b.is_floating_point()}
    return {"tables": held, "where": rank.target.where(type(model))}


def compared(rank, model, idx, want, parts):
    """The largest difference at each position of each row, and what is allowed."""
    gap = (torch.cat(parts, dim=1) - want).abs().amax(-1)
    windows = sorted({int(left) for left, _ in getattr(model, "window_sizes", []) if left >= 0})
    where = rank.target.where(type(model).forward)
    return {"gap": gap, "windows": windows, "where": where, **noise(rank, model, idx, want)}
