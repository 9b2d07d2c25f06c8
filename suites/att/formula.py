"""Attention by its formula in fp64, the inputs it is probed with, and how far another precision may be from it.

Query i of Tq stands at key position p = i + Tk - Tq (aligned to the end) and sees the keys j with p - left <= j <= p
(causal) or p - left <= j <= p + right; a negative side is unlimited. out = softmax(q k' / sqrt(D)) v over those keys,
zeros where there are none; query head h reads k/v head h // (Hq // Hkv). Shapes are (B, T, H, D), as in the interface.

Three probes:
    keys     q = k = 0, and v of key j is 1 + its head at channel j and 0 elsewhere: each key that a query sees shows
             up as (1 + head) / count in a channel of its own, so the exact key set can be read off
    values   integers / 32 in q and / 64 in k and v, so |q| <= 2 and |k|, |v| <= 1; exact in bf16 as well
    mild     the same with |q| <= 1/4, as bounds for bf16 grow with the scores
"""

import torch

from nanochat_gate import exact

CHANNELS = 16
U32, U16 = 2.0**-24, 2.0**-8  # unit roundoff of fp32 and bf16


def sees(Tq, Tk, causal, window):
    """(Tq, Tk) bool: which keys each query sees."""
    left, right = window
    right = 0 if causal else right
    at = torch.arange(Tq)[:, None] + Tk - Tq
    key = torch.arange(Tk)[None, :]
    mask = torch.ones(Tq, Tk, dtype=torch.bool)
    if left >= 0:
        mask &= key >= at - left
    if right >= 0:
        mask &= key <= at + right
    return mask


def inputs(probe, B, Tq, Tk, Hq, Hkv):
    """q, k, v in fp32, the same wherever they are asked for."""
    if probe == "keys":
        D = max(8, -(-Tk // 8) * 8)
        heads = torch.arange(1.0, Hkv + 1)[:, None]
        v = torch.eye(Tk, D)[:, None, :] * heads
        return torch.zeros(B, Tq, Hq, D), torch.zeros(B, Tk, Hkv, D), v.expand(B, Tk, Hkv, D).contiguous()
    shapes = {"q": (B, Tq, Hq, CHANNELS), "k": (B, Tk, Hkv, CHANNELS), "v": (B, Tk, Hkv, CHANNELS)}
    q, k, v = (exact.integers(shape, 64, "attention", name).float() / 64 for name, shape in shapes.items())
    return q * (0.25 if probe == "mild" else 2.0), k, v


def _expand(q, k, v):
    """All three in fp64, with a k/v head for each query head."""
    group = q.size(2) // k.size(2)
    return q.double(), k.double().repeat_interleave(group, dim=2), v.double().repeat_interleave(group, dim=2)


def _weights(q, k, mask):
    """Softmax weights (B, H, Tq, Tk) of expanded q and k; rows without a key are zeros."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.size(3) ** 0.5
    blind = ~mask.any(-1, keepdim=True)  # a softmax over nothing would be NaN
    return torch.softmax(scores.masked_fill(~(mask | blind), float("-inf")), dim=-1) * mask


def attend(q, k, v, mask):
    """(B, Tq, Hq, D) in fp64."""
    q, k, v = _expand(q, k, v)
    return torch.einsum("bhqk,bkhd->bqhd", _weights(q, k, mask), v)


def _weight_error(q, k, mask, rounded):
    """How far, relatively, a softmax weight may be off: (B, H, Tq, 1), of expanded q and k.

    fp32, u = 2^-24, S the largest |q|.|k| / sqrt(D) of a row. A score is D products and sums and a scaling:
    (D + 2) S u. Its maximum taken off: 2 S u. exp, good to two ulps: 4 u. An online softmax rescales by such an
    exponential once a block of at least 16 keys: (2 S + 5) u each. The sum of n weights: n u. All that in numerator
    and denominator, then their quotient: twice the sum, and 2 u.
    rounded (bf16, w = 2^-8): each tensor between two steps may be kept in bf16. q and k, both scaled by a rounded
    constant, then the score, and the score with its mask: 6 S w, in numerator and denominator; weights in both: 2 w.
    """
    S = torch.einsum("bqhd,bkhd->bhqk", q.abs(), k.abs()) / q.size(3) ** 0.5
    S = S.masked_fill(~mask, 0.0).amax(-1, keepdim=True)
    n = mask.sum(-1, keepdim=True)
    error = (2 * ((q.size(3) + 4) * S + 4 + (n // 16 + 1) * (2 * S + 5) + n) + 2) * U32
    return torch.expm1(error + (12 * S + 2) * U16 if rounded else error)


def right(q, k, v, mask, rounded=False):
    """`attend`, and how far from it a right output may be; both (B, Tq, Hq, D).

    Each of n terms weight * v is off by its weight's error and by n + 1 roundings; in bf16 the output by one more.
    """
    q, k, v = _expand(q, k, v)
    p = _weights(q, k, mask)
    off = _weight_error(q, k, mask, rounded) + (mask.sum(-1, keepdim=True) + 1) * U32 + (U16 if rounded else 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), torch.einsum("bhqk,bkhd->bqhd", p * off, v.abs())


def gradients(q, k, v, mask, out_grad):
    """((dq, dk, dv), how far from them right fp32 ones may be), in fp64, of a mask that leaves no query without a key.

    With p the weights and g the gradient of the output: dv = p' g; ds = p (g.v - g.out); dq = ds k / sqrt(D),
    dk = ds' q / sqrt(D). A weight is off by its error R, which enters ds directly and through out, where g.v and g.out
    are dots of D terms and out a sum of n: their sizes times 2 R + (2 D + n + 8) u. The last sums add as many roundings
    as they have terms; a k/v head's are over all query heads that read it.
    """
    group = q.size(2) // k.size(2)
    q, k, v = _expand(q, k, v)
    g, scale, n = out_grad.double(), q.size(3) ** -0.5, mask.sum(-1, keepdim=True)
    p, R = _weights(q, k, mask), _weight_error(q, k, mask, False)

    def products(ds, ds_T, p, q, k, g):
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, k) * scale
        dk, dv = (torch.einsum("bhqk,bqhd->bkhd", *two) for two in ((ds_T * scale, q), (p, g)))
        return dq, *(t.unflatten(2, (-1, group)).sum(3) for t in (dk, dv))

    gv = torch.einsum("bqhd,bkhd->bhqk", g, v)
    ds = p * (gv - (p * gv).sum(-1, keepdim=True))
    size_gv = torch.einsum("bqhd,bkhd->bhqk", g.abs(), v.abs())
    size = p * (size_gv + (p * size_gv).sum(-1, keepdim=True))
    off = size * (2 * R + (2 * q.size(3) + n + 8) * U32)
    last = (q.size(1) * group + 2) * U32
    bounds = products(off + size * (n + 2) * U32, off + size * last, p * (R + last), q.abs(), k.abs(), g.abs())
    return products(ds, ds, p, q, k, g), bounds
