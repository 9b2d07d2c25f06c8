"""Attention behind the FlashAttention-3 interface: the FA3 kernel for bf16 tensors on a Hopper GPU, else torch's SDPA.

    from nanochat.flash_attention import flash_attn
    y = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(left, 0))

Which one runs is decided at each call by the tensors, not by what the machine has: a CPU run on a machine with a GPU,
or an fp32 model on that GPU, gets SDPA. NANOCHAT_FORCE_SDPA=1 means SDPA always.
"""

import os
from types import SimpleNamespace

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------------
# Which kernel.


def _load_flash_attention_3():
    """The FA3 module, or None where there is no Hopper GPU (what FA3 is built for) or nothing to load."""
    try:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
            return None
    except Exception:
        return None
    try:
        import flash_attn_interface as kernel  # the FA3 package, built locally
    except Exception:
        try:
            from kernels import get_kernel

            kernel = get_kernel("kernels-community/flash-attn3")
        except Exception:
            return None
    kernel = getattr(kernel, "flash_attn_interface", kernel)
    return kernel if hasattr(kernel, "flash_attn_func") and hasattr(kernel, "flash_attn_with_kvcache") else None


_fa3 = _load_flash_attention_3()
HAS_FA3 = _fa3 is not None
_override_impl = None  # None, "fa3" or "sdpa"; for tests


def _sdpa_is_forced():
    return os.environ.get("NANOCHAT_FORCE_SDPA", "").strip().lower() in ("1", "true", "yes")


def _resolve_use_fa3(*tensors):
    """Whether a call on `tensors` uses FA3; without tensors, whether a call on bf16 CUDA tensors would."""
    if _override_impl not in (None, "fa3", "sdpa"):
        raise ValueError(f"_override_impl is {_override_impl!r}: expected None, 'fa3' or 'sdpa'.")
    if _sdpa_is_forced() or _override_impl == "sdpa":
        return False
    fits = HAS_FA3 and all(t.is_cuda and t.dtype == torch.bfloat16 for t in tensors)
    if _override_impl == "fa3" and not fits:
        raise RuntimeError("_override_impl is 'fa3', which needs a loaded FA3 kernel and bf16 CUDA tensors: unset it.")
    return fits


USE_FA3 = _resolve_use_fa3()  # for reports only; each call decides anew

# ---------------------------------------------------------------------------------------------------------------------
# The SDPA path.


def _check_heads(q, k, v):
    if k.shape != v.shape or q.size(0) != k.size(0) or q.size(3) != k.size(3) or q.size(2) % k.size(2):
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit: expected (B, T, H, D) with "
            "equal B and D, k and v of one shape, and q heads a multiple of k heads."
        )


def _sdpa(q, k, v, causal, window_size):
    """Attend with q (B, Tq, Hq, D) to k, v (B, Tk, Hkv, D), the last query standing at the last key."""
    _check_heads(q, k, v)
    Tq, Tk = q.size(1), k.size(1)
    left, right = window_size
    if causal:
        right = 0
    first = Tk - Tq  # where among the keys the first query stands
    if left >= 0 and first - left > 0:  # keys before every query's window
        k, v = k[:, first - left :], v[:, first - left :]
        Tk, first = k.size(1), left
    bounded_left = 0 <= left < Tk - 1
    bounded_right = right >= 0 and first + right < Tk - 1
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    gqa = q.size(1) != k.size(1)
    if not bounded_left and not bounded_right:
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)
    elif not bounded_left and right == 0 and Tq == Tk:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    else:
        at = torch.arange(Tq, device=q.device)[:, None] + first
        key = torch.arange(Tk, device=q.device)[None, :]
        mask = torch.ones(Tq, Tk, dtype=torch.bool, device=q.device)
        if left >= 0:
            mask &= key >= at - left
        if right >= 0:
            mask &= key <= at + right
        blind = -first - right if right >= 0 else 0  # this many leading queries stand before the first key they may see
        if blind > 0:
            mask[:blind] = True  # a softmax over nothing is NaN, in the gradient too; FA gives zeros
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)
        if blind > 0:
            y = y.masked_fill((at + right < 0), 0.0)
    return y.transpose(1, 2)


# ---------------------------------------------------------------------------------------------------------------------
# The interface.


def flash_attn_func(q, k, v, causal=False, window_size=(-1, -1)):
    """softmax(q k' / sqrt(D)) v, with q (B, Tq, Hq, D) and k, v (B, Tk, Hkv, D) -> (B, Tq, Hq, D).

    Queries are aligned to the end of the keys: query i stands at key position p = i + Tk - Tq and sees the keys j with
    p - left <= j <= p + right, where window_size = (left, right), -1 is unlimited, and causal means right = 0.
    A query that sees no key gives zeros. With fewer k/v heads, q head h uses k/v head h // (Hq // Hkv).
    Raises ValueError when the shapes do not fit.
    """
    if not _resolve_use_fa3(q, k, v):
        return _sdpa(q, k, v, causal, window_size)
    y = _fa3.flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    return y[0] if isinstance(y, tuple) else y


def _positions(cache_seqlens, k_cache, k, v):
    """Each row's cache position as a list of ints, checked against the cache's length and the rows to be written."""
    B, capacity = k_cache.shape[:2]
    if (k is None) != (v is None):
        raise ValueError("Only one of k and v was given: pass both, or neither to attend to the cache as it stands.")
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("k and v were given without cache_seqlens: pass the position to write each row at.")
        return [capacity] * B
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((B,), cache_seqlens)
    if cache_seqlens.shape != (B,):
        raise ValueError(f"cache_seqlens has shape {tuple(cache_seqlens.shape)}: expected one position a row, ({B},).")
    starts = cache_seqlens.tolist()
    new = 0 if k is None else k.size(1)
    if min(starts) < 0 or max(starts) + new > capacity:
        raise ValueError(
            f"The KV cache holds {capacity} positions per row, but {new} new ones were to go in at {starts}: "
            "make the cache longer or the sequence shorter."
        )
    return starts


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, cache_seqlens=None, causal=False, window_size=(-1, -1)
):
    """Write k, v (B, Tnew, Hkv, D) into the caches (B, T, Hkv, D) in place, then attend with q to old and new keys.

    Row b is written at cache_seqlens[b] (int32, shape (B,)), and q (B, Tq, Hq, D) attends to its first
    cache_seqlens[b] + Tnew keys as in flash_attn_func. cache_seqlens is left as it is: the caller advances it.
    Without k and v nothing is written; without cache_seqlens, too, the whole cache is attended to.
    Raises ValueError, with nothing written, when the new keys run past the end of the cache.
    """
    starts = _positions(cache_seqlens, k_cache, k, v)
    if _resolve_use_fa3(q, k_cache, v_cache):
        if torch.is_tensor(cache_seqlens):
            cache_seqlens = cache_seqlens.to(torch.int32)
        y = _fa3.flash_attn_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, causal=causal, window_size=window_size
        )
        return y[0] if isinstance(y, tuple) else y
    _check_heads(q, k_cache, v_cache)
    if k is not None:
        _check_heads(q, k, v)
    new = 0 if k is None else k.size(1)
    # Rows at one position go together, others one by one: a mask would let stale NaNs beyond a row's end through.
    rows = [slice(None)] if len(set(starts)) == 1 else [slice(b, b + 1) for b in range(len(starts))]
    out = []
    for row in rows:
        start = starts[row][0]
        if new:
            k_cache[row, start : start + new] = k[row]
            v_cache[row, start : start + new] = v[row]
        end = start + new
        out.append(_sdpa(q[row], k_cache[row, :end], v_cache[row, :end], causal, window_size))
    return torch.cat(out) if len(out) > 1 else out[0]


flash_attn = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_with_kvcache=flash_attn_with_kvcache)
