"""From what ranks returned to one sentence on what is wrong, for all tests of this area. Runs in pytest."""

import torch

from nanochat_gate import verify
from suites.att import formula

SHOWN = 3


def run(ranks, backend, dtype, function, *args):
    """`function(rank, *args, claimed)` on one rank without a process group, in a run whose compute dtype is `dtype`."""
    claimed = ("cuda" if backend == "nccl" else "cpu") in ranks.facts.claims
    alone = {"size": 1, "backend": backend, "group": None, "torchrun": False, "env": {"NANOCHAT_DTYPE": dtype}}
    return ranks(function, *args, claimed, **alone)[0]


def all_right(cases, wrong, expected, where="", hint=""):
    """verify() that no case is wrong. wrong: what is wrong with each case, "" where nothing is."""
    __tracebackhide__ = True
    found = [f"{name(case)}: {text}" for case, text in zip(cases, wrong, strict=True) if text]
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    actual = f"{len(found)} of {len(cases)} cases are wrong. " + "; ".join(found[:SHOWN]) + more
    verify(not found, expected, actual, where=where, hint=hint)


def name(case):
    """A case in few words, for messages."""
    Tq, Tk = case.get("Tq", case.get("T")), case.get("Tk", case.get("T"))
    words = [f"T={Tq}" if Tq == Tk else f"Tq={Tq} Tk={Tk}"] if Tq is not None else []
    words += [f"window={tuple(case['window'])}", f"heads={case['Hq']}/{case['Hkv']}"]
    if not case.get("causal", True):
        words.append("not causal")
    if "splits" in case:
        words.append(f"fed as {spans(case['splits'])} into {case['capacity']} positions")
        if any(case["starts"]):
            words.append(f"rows at {case['starts']}")
    return " ".join(words)


def spans(splits):
    """[6, 1, 1, 1] -> "6+1x3"."""
    parts = []
    for split in splits:
        if parts and parts[-1][0] == split:
            parts[-1][1] += 1
        else:
            parts.append([split, 1])
    return "+".join(str(split) + (f"x{count}" if count > 1 else "") for split, count in parts)


def shaped(got, want_shape, dtype):
    """What is wrong with an output before its values are looked at, or ""."""
    if isinstance(got, str):
        return got
    if tuple(got.shape) != tuple(want_shape):
        return f"the output has shape {tuple(got.shape)} instead of {tuple(want_shape)}"
    if str(got.dtype) != f"torch.{dtype}":
        return f"the output of {dtype} tensors is {got.dtype}"
    return ""


def keys_seen(got_BTHD, mask, group, dtype):
    """What is wrong with the outputs of the keys probe, or "". mask: (Tq, Tk), or one for each row of the batch."""
    Tk = mask.size(-1)
    mask_BTHK = mask.expand(got_BTHD.size(0), -1, -1)[:, :, None, :].expand(-1, -1, got_BTHD.size(2), -1)
    value, beyond = got_BTHD.double().split([Tk, got_BTHD.size(3) - Tk], dim=-1)
    heads = torch.arange(got_BTHD.size(2)) // group
    want = mask_BTHK * (1.0 + heads[:, None]) / mask_BTHK.sum(-1, keepdim=True).clamp_min(1)
    # 1 / count: exp(0) is exactly 1; a reciprocal or quotient, a product and the output are rounded, 4 allowed.
    off = ~((value - want).abs() <= want * 4 * (formula.U16 if dtype == "bfloat16" else formula.U32))
    bad = off.any(-1) | (beyond != 0).any(-1)
    if not bad.any():
        return ""
    row, query, head = torch.nonzero(bad)[0].tolist()
    at, got, mask = f"row {row}, query {query}, head {head}", value[row, query, head], mask_BTHK[row, query, head]
    if not got.isfinite().all():
        return f"{at} gives {float(got[~got.isfinite()][0])}"
    seen = got.abs() > 0.5 / Tk
    if not torch.equal(seen, mask):
        return f"{at} sees {ranges(seen)} instead of {ranges(mask)}"
    if not off[row, query, head].any():
        return f"{at} gives {float(beyond[row, query, head].abs().max()):.4g} that no key holds"
    key = int(off[row, query, head].nonzero()[0])
    holds = float(got[key] * mask.sum())
    return f"{at} reads {holds:.6g} at key {key} where k/v head {int(heads[head])} holds {1 + int(heads[head])}"


def ranges(flags):
    """Keys as "keys 3-7, 9"."""
    keys = torch.nonzero(flags)[:, 0].tolist()
    parts = []
    for key in keys:
        if parts and parts[-1][1] == key - 1:
            parts[-1][1] = key
        else:
            parts.append([key, key])
    return "keys " + ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in parts) if parts else "no key"


def within(got, want, bound, what="the output"):
    """What is wrong with `got`, or "": its worst element, measured in bounds."""
    gap = (got.double() - want).abs()
    over = ~(gap <= bound)
    if not over.any():
        return ""
    ratio = (gap / bound.clamp_min(1e-300)).nan_to_num(float("inf"))
    at = tuple(int(i) for i in torch.unravel_index(ratio.argmax(), ratio.shape))
    return (
        f"{what} at {list(at)} (row, time, head, channel) is {float(got[at]):.6g} instead of {float(want[at]):.6g}, "
        f"off by {float(gap[at]):.2g} with {float(bound[at]):.2g} allowed; {int(over.sum())} of {over.numel()} are off"
    )
