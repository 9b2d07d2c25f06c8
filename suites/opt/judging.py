"""How the OPT suite compares ranks with one process, in pytest's own process."""

from contextlib import contextmanager

import torch

from nanochat_gate import NotTested, Violation, exact, verify
from suites.opt import truth
from suites.steps import FLOAT32


@contextmanager
def expecting(expected):
    """Whatever goes wrong inside is a violation of `expected`."""
    try:
        yield
    except Violation as error:
        fields = {"where": error.where, "hint": error.hint, "detail": error.detail, "repro": error.repro}
        raise Violation(expected, error.actual, **fields) from None


def differences(single, worlds):
    """ "rank 1 of 3, step 0: ..." of the first rank and step that differ from one process in a bit, or ""."""
    for rank, after in enumerate(worlds):
        for step, (want, got) in enumerate(zip(single, after, strict=True)):
            names = exact.differing(want, got)
            if names:
                return f"rank {rank} of {len(worlds)}, step {step}: {exact.summary(want, got, names)}"
    return ""


def check_parity(ranks, function, *args, size, backend, lane="withheld", where=""):
    """`function(rank, *args, shares)` gives on every rank, after every step, the bits it gives in one process.

    Matrix products of a stack may round otherwise than those of its parts. So where bits differ, one process steps
    share by share before anything is called wrong.
    """
    if backend == "nccl" and size & (size - 1):
        raise NotTested(f"NCCL averages by multiplying with float(1/{size}): exact gradients do not stay exact")
    worlds = ranks(function, *args, size=size, backend=backend, lane=lane, env=FLOAT32)
    found = differences(ranks.single(function, *args, backend=backend, env=FLOAT32), worlds)
    if found:
        by_share = ranks.single(function, *args, size, backend=backend, env=FLOAT32)
        verify(
            not differences(by_share, worlds),
            "every parameter after every step bit-equal to single-process training",
            found,
            where=where,
        )


def check_course(ranks, worlds, groups, steps, hint=""):
    """AdamW groups went on every rank as torch.optim.AdamW takes them in fp64, within the bound of truth.py."""
    course = ranks.single(truth.course, groups, steps)
    for step, true in enumerate(course):
        for group in groups:
            unit = truth.UNIT[getattr(torch, group.get("dtype", "float32"))]
            for name in (f"{group['name']}[{i}]" for i in range(len(group["shapes"]))):
                formula = f"{truth.FORMULA}, u = {unit:.3g}, t = {step + 1}"
                for rank, after in enumerate(worlds):
                    ratio, distance, bound = truth.worst(after[step][name], *true[name])
                    verify(
                        ratio <= 1,
                        f"torch.optim.AdamW in fp64 within {bound:.3g}: {formula}",
                        f"rank {rank} of {len(worlds)}, step {step}, {name}: off by {distance:.3g}, {ratio:.3g} times "
                        "the bound",
                        hint=hint,
                    )
