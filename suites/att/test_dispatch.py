"""ATT: which kernel attention goes to, judged with a GPU presented on a machine that has none (see fake_gpu).

    ATT-01  CPU tensors are attended to on the CPU         ATT-02  at least under NANOCHAT_FORCE_SDPA
    ATT-03  the switch also wins for tensors on a GPU
    ATT-04  a run in fp32 keeps away from kernels that take no fp32, ATT-05 and so does any call with such tensors
    ATT-06  so does an older GPU, ATT-22 and a newer one   ATT-07  a kernel is asked for what the caller asked for

What a call gives is judged, not how it was decided: a target that tries a kernel, is refused and goes on to SDPA is
right. A kernel's own arithmetic can't be judged without a GPU, nor can targets that do more on it than attend.
"""

import re

import pytest

from nanochat_gate import NotTested, Unsupported, requirement, verify
from suites.att import dispatch, formula, judging
from suites.att.dispatch import SWITCH

HOPPER = [9, 0]
ON_CPU = [["cpu", "bfloat16"], ["cpu", "float32"]]
NO_GPU = re.compile(r"not compiled with CUDA|NVIDIA driver|CUDA driver|CUDA error", re.IGNORECASE)
ALONE = {"size": 1, "group": None, "torchrun": False, "fresh": True}


def ask(ranks, capability, tensors, env=None, function=dispatch.dispatched, window=dispatch.FULL):
    return ranks(function, capability, tensors, window, env=env or {}, **ALONE)[0]


def check(ranks, answers, expected, capability, circumstances="", hint=None, window=dispatch.FULL):
    """Every answer is the right output; `hint()` says more if one is not."""
    __tracebackhide__ = True
    wrong = [(answer, text) for answer in answers if (text := what_is_wrong(answer, window))]
    if not wrong:
        return
    answer, text = wrong[0]
    if answer["error"] and not answer["kernel"] and (answer["device"] == "cuda" or NO_GPU.search(answer["error"])):
        raise NotTested(f"{text}; a real GPU might have done that, so it can't be judged without one")
    more = f" ({len(wrong)} of {len(answers)} calls are wrong)" if len(answers) > 1 else ""
    reported = f"a GPU of compute capability {capability[0]}.{capability[1]} is reported{circumstances}"
    where = answer["where"] or ranks.facts.where.get(answer["function"], "")
    verify(False, expected, f"{reported}: {text}{more}", where=where, hint=hint() if hint else "")


def what_is_wrong(answer, window):
    device = {"cpu": "the CPU", "cuda": "the GPU"}[answer["device"]]
    call = f"{answer['function']} with {answer['dtype']} tensors on {device}"
    if answer["kernel"] and answer["error"]:
        return f"{call} goes to the CUDA kernel of {answer['kernel']}, which fails: {answer['error']}"
    if answer["error"]:
        return f"{call} raises {answer['error']}"
    if not answer["function"].startswith("flash_attn"):
        return "" if bool(answer["out"].isfinite().all()) else f"{call} gives values that are not finite"
    q, k, v = formula.inputs("mild", dispatch.B, dispatch.T, dispatch.T, dispatch.Hq, dispatch.Hkv)
    mask = formula.sees(dispatch.T, dispatch.T, True, window)
    text = judging.shaped(answer["out"], q.shape, answer["dtype"])
    # fp16 has more bits than bf16, so its bound holds for it too.
    rounded = answer["dtype"] != "float32"
    text = text or judging.within(answer["out"], *formula.right(q, k, v, mask, rounded))
    return f"{call}: {text}" if text else ""


@requirement("ATT-01", "With a GPU in the machine, CPU tensors are attended to on the CPU", level="should")
def test_cpu_tensors(ranks):
    """A CPU run on a machine that has a GPU crashes in a CUDA kernel, on its first batch."""
    check(ranks, ask(ranks, HOPPER, ON_CPU), "attention on the CPU for CPU tensors, bf16 and fp32", HOPPER)


@requirement("ATT-02", "NANOCHAT_FORCE_SDPA keeps CPU tensors on the CPU", claim="cpu")
@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_switch(ranks, value):
    """Without a switch nobody can run on the CPU of a GPU machine, to debug or to compare."""

    def hint():
        said = []
        if not ranks(dispatch.reads_switch, **ALONE)[0]:
            said.append(f"the attention module does not read {SWITCH}: no switch for the implementation exists")
        fp32 = ask(ranks, HOPPER, ON_CPU[1:], {"NANOCHAT_DTYPE": "float32"})
        if not any(what_is_wrong(answer, dispatch.FULL) for answer in fp32):
            said.append("only NANOCHAT_DTYPE=float32 happens to avoid the kernel, as all of the run then is in fp32")
        return "; ".join(said)

    answers = ask(ranks, HOPPER, ON_CPU, {SWITCH: value})
    expected = f"attention on the CPU for CPU tensors, at least with {SWITCH}={value}"
    check(ranks, answers, expected, HOPPER, f" and {SWITCH}={value}", hint)


@requirement("ATT-03", "NANOCHAT_FORCE_SDPA also wins over a kernel that fits", level="should", claim="cuda")
@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_switch_on_gpu(ranks, value):
    """Whoever suspects a kernel has no way to run without it, and believes they did."""
    answers = ask(ranks, HOPPER, [["cuda", "bfloat16"]], {SWITCH: value})
    for answer in answers:
        verify(
            not answer["kernel"],
            f"no kernel with {SWITCH}={value}",
            f"{answer['function']} goes to the kernel of {answer['kernel']}",
            where=ranks.facts.where.get(answer["function"], ""),
        )
    check(ranks, answers, f"attention by SDPA with {SWITCH}={value}", HOPPER)


@requirement("ATT-04", "A run in fp32 keeps away from kernels that take no fp32", claim="cuda")
def test_fp32_run(ranks):
    """A run that asks for fp32 stops at its first attention."""
    answers = ask(ranks, HOPPER, [["cuda", "float32"]], {"NANOCHAT_DTYPE": "float32"}, dispatch.fp32_run)
    expected = "attention to fp32 tensors by SDPA, as no FlashAttention kernel takes them"
    check(ranks, answers, expected, HOPPER, " and NANOCHAT_DTYPE=float32")


@requirement("ATT-05", "A kernel gets tensors of no dtype that it does not take", level="should", claim="cuda")
def test_dtypes(ranks):
    """A model kept in fp32 or fp16 beside a bf16 run stops at its first attention."""
    answers = ask(ranks, HOPPER, [["cuda", "float32"], ["cuda", "float16"]])
    check(ranks, answers, "attention by SDPA for dtypes that the kernel does not take", HOPPER)


def check_hardware(ranks, capability, has):
    capability = [int(part) for part in capability.split(".")]
    expected = f"attention by SDPA where FlashAttention-3 has no code for the GPU ({has})"
    check(ranks, ask(ranks, capability, [["cuda", "run"]]), expected, capability)


@requirement("ATT-06", "No kernel is used on a GPU older than those it has code for", claim="cuda")
def test_older_hardware(ranks):
    """On an older GPU every run stops at its first attention."""
    check_hardware(ranks, "7.5", "it has from 8.0 on")


@requirement(
    "ATT-22", "No kernel is used on a GPU newer than those it was first built for", level="should", claim="cuda"
)
@pytest.mark.parametrize("capability", ["10.0", "12.0"])
def test_newer_hardware(ranks, capability):
    """On a new GPU every run stops at its first attention. A should: a hub may have newer builds by now."""
    check_hardware(ranks, capability, "its builds for 9.0 do not run elsewhere")


@requirement("ATT-07", "What a kernel is asked for is what the caller asked for", claim="cuda")
def test_handed_over(ranks):
    """A window or causal flag lost on the way to the kernel shows on GPUs only, as a better loss."""
    answers = ask(ranks, HOPPER, [["cuda", "bfloat16"]], window=dispatch.WINDOW)
    reached = [answer for answer in answers if answer["kernel"]]
    if not reached:
        raise Unsupported("bf16 tensors on a Hopper GPU reach no FlashAttention kernel: nothing is handed over")
    expected = "causal attention with its window, as a stub of the kernel computes it by the formula"
    check(ranks, reached, expected, HOPPER, window=dispatch.WINDOW)
