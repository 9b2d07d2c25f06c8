"""ATT: attention with a KV cache, against its formula in fp64.

    ATT-14  a prompt in one go, then token by token (what sampling does)
    ATT-15  the cache is written where the new keys belong and nowhere else
    ATT-16  a prompt in chunks     ATT-17  rows at different positions     ATT-21  q, k, v are left alone

Caches are filled with a sentinel first: what shines through from an unwritten position is far off, as is a key that
was written over.
"""

import pytest
import torch

from nanochat_gate import requirement
from suites.att import calls, formula, judging


def case(splits, window, starts=(0, 0), spare=0, heads=(4, 2)):
    capacity = max(starts) + sum(splits) + spare
    (Hq, Hkv), window = heads, [window, 0]
    return dict(splits=splits, window=window, starts=list(starts), capacity=capacity, Hq=Hq, Hkv=Hkv)


# The prompt alone fills its cache, as sampling sizes it; then single tokens, past the window.
PROMPTS = [case([T], window) for T in (1, 7, 33, 64) for window in (-1, 1, max(T - 2, 1), T)]
TOKENS = [
    case([prompt] + [1] * 9, window, spare=spare)
    for prompt in (1, 6, 33)
    for window in (-1, 1, 5, prompt + 7, prompt + 9)
    for spare in (0, 11)
]
OTHER_HEADS = [case([6] + [1] * 5, window, heads=heads) for heads in ((4, 4), (4, 1)) for window in (-1, 3)]
SAMPLED = PROMPTS + TOKENS + OTHER_HEADS
CHUNKED = [
    case(splits, window, spare=3)
    for splits in ([5, 3, 1, 7], [4, 4, 4], [1, 6], [33, 31])
    for window in (-1, 0, 1, 3, 5, sum(splits))
]
ROWS = [
    case(splits, window, starts=starts, spare=2)
    for splits in ([1, 1, 1], [4, 2])
    for starts in ((0, 3, 7), (9, 0))
    for window in (-1, 0, 2, 6)
]


def check(ranks, backend, cases, probe, dtype="float32"):
    """Every row's outputs are right, by the probe's own standard."""
    __tracebackhide__ = True
    answers = judging.run(ranks, backend, dtype, calls.decoded, cases, probe, dtype)
    wrong = [outputs_wrong(case, answer["out"], probe, dtype) for case, answer in zip(cases, answers, strict=True)]
    expected = {
        "keys": "each query sees the cached and new keys of its window up to itself and no other",
        "values": "softmax(q k' / sqrt(D)) v over cached and new keys in fp32, within its operations' roundings",
    }[probe]
    judging.all_right(cases, wrong, expected, where=ranks.facts.where.get("flash_attn_with_kvcache", ""))


def outputs_wrong(case, out, probe, dtype):
    """What is wrong with the outputs of one case, or ""."""
    q, k, v = calls.cache_inputs(case, probe)
    count = sum(case["splits"])
    text = judging.shaped(out, (len(case["starts"]), count, *q.shape[2:]), dtype)
    for start in sorted(set(case["starts"])):
        if text:
            break
        rows = [row for row, at in enumerate(case["starts"]) if at == start]
        mask = formula.sees(count, start + count, True, case["window"])
        if probe == "keys":
            text = judging.keys_seen(out[rows], mask, case["Hq"] // case["Hkv"], dtype)
        else:
            given = q[rows, start : start + count], k[rows, : start + count], v[rows, : start + count]
            text = judging.within(out[rows], *formula.right(*given, mask))
        text = f"of those from {start}, {text}" if text and len(set(case["starts"])) > 1 else text
    return text


def caches_wrong(case, answer, dtype):
    """What is wrong with the caches after one case, or ""."""
    if isinstance(answer["out"], str):
        return answer["out"]
    _, k, v = calls.cache_inputs(case, "values")
    for name, held, new in (("k", answer["k"], k), ("v", answer["v"], v)):
        want = torch.full_like(held, calls.SENTINEL)
        for row, start in enumerate(case["starts"]):
            end = start + sum(case["splits"])
            want[row, :end] = new[row, :end].to(held.dtype)
        off = (held != want).flatten(2).any(-1)
        if off.any():
            row, position = torch.nonzero(off)[0].tolist()
            end = case["starts"][row] + sum(case["splits"])
            what = "was written to" if position >= end else "does not hold its key"
            what = what if name == "k" else what.replace("key", "value")
            return f"position {position} of row {row} of the {name} cache {what}, after {end} positions"
    return ""


@requirement("ATT-14", "Attention through a cache is right for a prompt in one go, then token by token")
@pytest.mark.parametrize("probe", ["keys", "values"])
def test_sampling(ranks, backend, probe):
    """What is sampled comes from other attention than what was trained, and looks merely like a weaker model."""
    check(ranks, backend, SAMPLED, probe)


@requirement("ATT-15", "New keys and values are written to their place in the cache, bit for bit, and nothing else is")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_written(ranks, backend, dtype):
    """A stray write corrupts what was said before, in this row or in another user's."""
    cases = TOKENS + OTHER_HEADS
    answers = judging.run(ranks, backend, dtype, calls.decoded, cases, "values", dtype)
    wrong = [caches_wrong(case, answer, dtype) for case, answer in zip(cases, answers, strict=True)]
    expected = "in the caches the new keys and values at their positions, and elsewhere what was there before"
    judging.all_right(cases, wrong, expected, where=ranks.facts.where.get("flash_attn_with_kvcache", ""))


@requirement("ATT-16", "Attention through a cache is right for a prompt in chunks, and at window 0", level="should")
@pytest.mark.parametrize("probe", ["keys", "values"])
def test_chunks(ranks, backend, probe):
    """A server that feeds long prompts in chunks answers a slightly different prompt."""
    check(ranks, backend, CHUNKED, probe)


@requirement("ATT-17", "Each row of a cache is written and read at a position of its own", level="should")
@pytest.mark.parametrize("probe", ["keys", "values"])
def test_rows(ranks, backend, probe):
    """Prompts of different length in one batch overwrite each other's keys."""
    check(ranks, backend, ROWS, probe)
    answers = judging.run(ranks, backend, "float32", calls.decoded, ROWS, "values", "float32")
    wrong = [caches_wrong(case, answer, "float32") for case, answer in zip(ROWS, answers, strict=True)]
    expected = "in the caches each row's new keys and values at its own positions, and elsewhere what was there before"
    judging.all_right(ROWS, wrong, expected, where=ranks.facts.where.get("flash_attn_with_kvcache", ""))


@requirement("ATT-21", "Attention through a cache leaves q, k and v as they were", level="should")
def test_left_alone(ranks, backend):
    """A caller that uses its keys once more, for another cache or a comparison, uses others."""
    answers = judging.run(ranks, backend, "float32", calls.decoded, TOKENS, "values", "float32")
    wrong = ["" if answer["untouched"] else "q, k or v was changed" for answer in answers]
    expected = "q, k and v bit for bit as before the call"
    judging.all_right(TOKENS, wrong, expected, where=ranks.facts.where.get("flash_attn_with_kvcache", ""))
