"""ATT: what attention without a cache gives, against its formula in fp64.

    ATT-08  causal: the exact keys each query sees      ATT-09  causal: values within fp32's derived bound
    ATT-10  window 0, and fewer or more queries than keys (only direct callers meet these)
    ATT-11  not causal (nanochat never clears the flag)
    ATT-12  gradients                                   ATT-13  bf16 against fp32

The key probes find every window that is off by one; the values find a wrong scale, head or sum.
"""

import pytest

from nanochat_gate import requirement
from suites.att import calls, formula, judging

LENGTHS = (1, 2, 7, 17, 33, 64, 100)  # on and off any block
HEADS = ((4, 2), (4, 4), (4, 1))


def cases(sizes, windows, causal=True, heads=HEADS[:1]):
    """Every size (Tq, Tk) with every window that `windows(Tk)` names and all heads."""
    return [
        dict(Tq=Tq, Tk=Tk, Hq=Hq, Hkv=Hkv, causal=causal, window=list(window))
        for Tq, Tk in sizes
        for window in windows(Tk)
        for Hq, Hkv in heads
    ]


def boundaries(T):
    """Windows at which an off-by-one shows, of those a model can have: all of them reach at least one key back."""
    return [*((left, 0) for left in sorted({1, T - 2, T - 1, T, T + 5}) if left > 0), (-1, 0), (-1, -1)]


CAUSAL = cases([(T, T) for T in LENGTHS], boundaries) + cases([(17, 17)], boundaries, heads=HEADS[1:])
UNUSUAL = cases([(T, T) for T in LENGTHS], lambda T: [(0, 0)]) + cases(
    [(1, 7), (3, 10), (17, 33), (64, 100), (10, 3)], lambda T: [(0, 0), (1, 0), (T - 2, 0), (T, 0), (-1, 0)]
)
BOTH_WAYS = cases(
    [(1, 1), (2, 2), (7, 7), (33, 33), (64, 64), (5, 12)],
    lambda T: [(-1, -1), (0, 0), (1, 1), (T, -1), (-1, 0), (-1, T - 2)],
    causal=False,
)
SOME = cases(
    [(1, 1), (2, 2), (17, 17), (100, 100)], lambda T: [(-1, 0), *((left, 0) for left in {1, T - 2} if left > 0)]
) + cases([(33, 33)], lambda T: [(-1, 0), (7, 0)], heads=HEADS[1:])


def check(ranks, backend, some, probe, dtype="float32"):
    """The outputs of `some` cases are right, by the probe's own standard."""
    __tracebackhide__ = True
    wrong = []
    for case, out in zip(some, judging.run(ranks, backend, dtype, calls.outputs, some, probe, dtype), strict=True):
        q, k, v = formula.inputs(probe, 1, case["Tq"], case["Tk"], case["Hq"], case["Hkv"])
        mask = formula.sees(case["Tq"], case["Tk"], case["causal"], case["window"])
        text = judging.shaped(out, q.shape, dtype)
        if not text and probe == "keys":
            text = judging.keys_seen(out, mask, case["Hq"] // case["Hkv"], dtype)
        elif not text:
            text = judging.within(out, *formula.right(q, k, v, mask))
        wrong.append(text)
    expected = {
        "keys": "each query sees the keys of its window up to itself and no other, all alike where q = k = 0",
        "values": "softmax(q k' / sqrt(D)) v in fp32, within the roundings its operations can make",
    }[probe]
    judging.all_right(some, wrong, expected, where=ranks.facts.where.get("flash_attn_func", ""))


@pytest.mark.core
@requirement("ATT-08", "Causal attention sees exactly the keys of its window")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys(ranks, backend, dtype):
    """A key from the future leaks the answer; a window off by one trains a model that no other kernel can run."""
    check(ranks, backend, CAUSAL, "keys", dtype)


@requirement("ATT-09", "Causal attention in fp32 equals its formula")
def test_values(ranks, backend):
    """A wrong scale, or a query head that reads another k/v head, still trains, to a worse model."""
    check(ranks, backend, CAUSAL, "values")


@requirement("ATT-10", "Attention keeps to window 0 and aligns queries to the end of the keys", level="should")
@pytest.mark.parametrize("probe", ["keys", "values"])
def test_unusual(ranks, backend, probe):
    """Whoever calls the interface as FlashAttention documents it gets other keys than there."""
    check(ranks, backend, UNUSUAL, probe)


@requirement("ATT-11", "Attention that is not causal sees the keys on both sides", level="should")
@pytest.mark.parametrize("probe", ["keys", "values"])
def test_not_causal(ranks, backend, probe):
    """The causal flag is part of the interface: an encoder built on it would silently be blind to what follows."""
    check(ranks, backend, BOTH_WAYS, probe)


@requirement("ATT-12", "Gradients of causal attention equal those of its formula")
def test_gradients(ranks, backend):
    """A forward that is right with a backward that is not trains to somewhere else, and the loss still falls."""
    wrong = []
    for case, grads in zip(SOME, judging.run(ranks, backend, "float32", calls.gradients, SOME), strict=True):
        if isinstance(grads, str):
            wrong.append(grads)
            continue
        q, k, v = formula.inputs("values", 2, case["Tq"], case["Tk"], case["Hq"], case["Hkv"])
        mask = formula.sees(case["Tq"], case["Tk"], True, case["window"])
        given = q, k, v, mask, calls.out_grad(case)
        found = zip(("dq", "dk", "dv"), grads, *formula.gradients(*given), strict=True)
        wrong.append(next((text for what, *three in found if (text := judging.within(*three, what))), ""))
    expected = "dq, dk and dv of the formula, as fp64 gives them, within the roundings of fp32"
    judging.all_right(SOME, wrong, expected, where=ranks.facts.where.get("flash_attn_func", ""))


@requirement("ATT-13", "Causal attention in bf16 equals that in fp32 up to bf16's rounding")
def test_bf16(ranks, backend):
    """Training runs in bf16: sums kept in 8 bits lose the long contexts first."""
    full, half = (
        judging.run(ranks, backend, dtype, calls.outputs, CAUSAL, "mild", dtype) for dtype in ("float32", "bfloat16")
    )
    wrong = []
    for case, want, got in zip(CAUSAL, full, half, strict=True):
        q, k, v = formula.inputs("mild", 1, case["Tq"], case["Tk"], case["Hq"], case["Hkv"])
        mask = formula.sees(case["Tq"], case["Tk"], True, case["window"])
        text = judging.shaped(want, q.shape, "float32") or judging.shaped(got, q.shape, "bfloat16")
        allowed = sum(formula.right(q, k, v, mask, rounded)[1] for rounded in (True, False))
        wrong.append(text or judging.within(got, want.double(), allowed))
    expected = "bf16 outputs within the roundings of bf16 between the steps, of the fp32 outputs for the same inputs"
    judging.all_right(CAUSAL, wrong, expected, where=ranks.facts.where.get("flash_attn_func", ""))
