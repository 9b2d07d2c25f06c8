"""What ranks do in this area: call the target's attention on inputs that pytest knows as well.

A case is a dict of JSON values: Tq, Tk, Hq, Hkv, causal, window for a call without a cache; T, Hq, Hkv, window, starts,
splits, capacity for calls with one. A case that raises gives the words of the error in place of a tensor.
"""

import inspect

import torch

from nanochat_gate import Unsupported
from suites.att import formula

SENTINEL = 512.0  # what caches hold where nothing was written; exact in bf16


def attention(rank, dtype, claimed):
    """The target's attention functions, after one call to see that they run here at all.

    claimed: whether the target claims this device; if it doesn't and the call fails, that is UNSUPPORTED, no failure.
    """
    functions = offered(rank)
    q, k, v = (t.to(rank.device, getattr(torch, dtype)) for t in formula.inputs("values", 1, 4, 4, 2, 2))
    try:
        functions.flash_attn_func(q, k, v, causal=True, window_size=(-1, 0))
    except Exception as error:
        if claimed:
            raise
        raise Unsupported(f"attention to {dtype} tensors on {rank.device.type} raises {words(error)}") from error
    return functions


def offered(rank):
    """The target's attention functions, whose interface is the one this area speaks of."""
    try:
        functions = rank.target.attention()
    except Unsupported as missing:
        raise Unsupported(f"{missing.what}: its attention is judged through the model") from missing
    for function in ("flash_attn_func", "flash_attn_with_kvcache"):
        known = inspect.signature(getattr(functions, function, _none)).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in known):
            for lacks in {"causal", "window_size"} - {p.name for p in known}:
                raise Unsupported(f"the target's {function} takes no {lacks}")
    return functions


def _none(causal, window_size):
    """Stands for a function that a target does not have."""


def words(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def only(out):
    """The output alone where log-sum-exps come with it."""
    return out[0] if isinstance(out, (tuple, list)) else out


def outputs(rank, cases, probe, dtype, claimed):
    """flash_attn_func's output for each case."""
    functions = attention(rank, dtype, claimed)
    found = []
    for case in cases:
        given = formula.inputs(probe, 1, case["Tq"], case["Tk"], case["Hq"], case["Hkv"])
        q, k, v = (t.to(rank.device, getattr(torch, dtype)) for t in given)
        try:
            out = only(functions.flash_attn_func(q, k, v, causal=case["causal"], window_size=tuple(case["window"])))
        except Exception as error:
            found.append(f"raises {words(error)}")
            continue
        found.append(out.detach().cpu())
    return found


def gradients(rank, cases, claimed):
    """dq, dk, dv of flash_attn_func for each case, in fp32."""
    functions = attention(rank, "float32", claimed)
    found = []
    for case in cases:
        given = formula.inputs("values", 2, case["Tq"], case["Tk"], case["Hq"], case["Hkv"])
        leaves = [t.to(rank.device).requires_grad_() for t in given]
        try:
            out = only(functions.flash_attn_func(*leaves, causal=True, window_size=tuple(case["window"])))
            grads = torch.autograd.grad(out, leaves, out_grad(case).to(rank.device))
        except Exception as error:
            found.append(f"raises {words(error)}")
            continue
        found.append([g.cpu() for g in grads])
    return found


def out_grad(case):
    """The gradient that comes back to the output of a case."""
    return formula.inputs("values", 2, case["Tq"], case["Tk"], case["Hq"], case["Hkv"])[0].flip(1) / 2


def decoded(rank, cases, probe, dtype, claimed):
    """Feeds each case through a cache; gives the outputs, the caches after it, and whether q, k, v stayed as they were.

    Row b begins at position starts[b] of its sequence, with what came before already in the cache. The splits are fed
    one call after another; the caller advances cache_seqlens, as nanochat's model does.
    """
    functions = attention(rank, dtype, claimed)
    if not hasattr(functions, "flash_attn_with_kvcache"):
        raise Unsupported("the target's attention module has no flash_attn_with_kvcache")
    return [_decode(rank, functions, case, probe, getattr(torch, dtype)) for case in cases]


def _decode(rank, functions, case, probe, dtype):
    starts, splits = case["starts"], case["splits"]
    B = len(starts)
    q, k, v = (t.to(rank.device, dtype) for t in cache_inputs(case, probe))
    shape = (B, case["capacity"], case["Hkv"], k.size(3))
    k_cache, v_cache = (torch.full(shape, SENTINEL, dtype=dtype, device=rank.device) for _ in "kv")
    for b, start in enumerate(starts):
        k_cache[b, :start], v_cache[b, :start] = k[b, :start], v[b, :start]
    at = torch.tensor(starts, dtype=torch.int32, device=rank.device)
    outs, untouched = [], True
    for count in splits:
        rows = [slice(a, a + count) for a in at.tolist()]
        new_q, new_k, new_v = (torch.stack([t[b, row] for b, row in enumerate(rows)]) for t in (q, k, v))
        before = [t.clone() for t in (new_q, new_k, new_v)]
        try:
            out = functions.flash_attn_with_kvcache(
                new_q, k_cache, v_cache, k=new_k, v=new_v, cache_seqlens=at.clone(), causal=True,
                window_size=tuple(case["window"]),
            )  # fmt: skip
        except Exception as error:
            outs = f"at positions {at.tolist()} raises {words(error)}"
            break
        outs.append(only(out).detach().cpu())
        untouched &= all(torch.equal(a, b) for a, b in zip(before, (new_q, new_k, new_v), strict=True))
        at += count
    joined = outs if isinstance(outs, str) else torch.cat(outs, dim=1)
    return {"out": joined, "k": k_cache.cpu(), "v": v_cache.cpu(), "untouched": untouched}


def cache_inputs(case, probe):
    """q, k, v of the whole sequences of a case with a cache."""
    longest = max(case["starts"]) + sum(case["splits"])
    return formula.inputs(probe, len(case["starts"]), longest, longest, case["Hq"], case["Hkv"])
