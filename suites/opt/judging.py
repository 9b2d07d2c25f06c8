"""How the OPT suite compares ranks with one process, in pytest's own process."""

from contextlib import contextmanager

import torch

from nanochat_gate import NotTested, Violation, exact
from suites.opt import truth
from suites.opt.groups import step_of
from suites.steps import FLOAT32

SAME = "every parameter after every step bit-equal to single-process training"
HINTS = {
    "getFuture not implemented": "Gloo's reduce-scatter has no future: wait for the Work that the collective returns",
    "outputShape[0] * worldSize": "pad dim 0, such as a vocabulary, to a multiple of the number of ranks",
}


@contextmanager
def expecting(expected):
    """Whatever goes wrong inside is a violation of `expected`."""
    try:
        yield
    except Violation as error:
        hint = error.hint or next((hint for words, hint in HINTS.items() if words in error.actual), "")
        fields = {"where": error.where, "hint": hint, "detail": error.detail, "repro": error.repro}
        raise Violation(expected, error.actual, **fields) from None


def refute(ranks, groups, name, expected, actual, hint=""):
    """Raise the Violation, pointing at the step() that updates parameter `name` of the groups, or of the model."""
    raise Violation(expected, actual, where=ranks.single(step_of, groups, name), hint=hint)


def first_difference(single, worlds):
    """(parameter, "rank 1 of 3, step 0: ...") where a rank first differs from one process in a bit, or None."""
    for rank, after in enumerate(worlds):
        for step, (want, got) in enumerate(zip(single, after, strict=True)):
            names = exact.differing(want, got)
            if names:
                return names[0], f"rank {rank} of {len(worlds)}, step {step}: {exact.summary(want, got, names)}"
    return None


def check_parity(ranks, function, steps, what, *, size, backend, lane="withheld"):
    """function(rank, steps, what) gives on every rank, after every step, the bits it gives in one process.

    what: a config of the target's own model, or hand-built groups. Matrix products of a stack may round otherwise than
    those of its parts; so where bits differ, one process steps share by share before anything is called wrong.
    """
    if backend == "nccl" and size & (size - 1):
        raise NotTested(f"NCCL averages by multiplying with float(1/{size}): exact gradients do not stay exact")
    with expecting(SAME):
        worlds = ranks(function, steps, what, size=size, backend=backend, lane=lane, env=FLOAT32)
    found = first_difference(ranks.single(function, steps, what, backend=backend, env=FLOAT32), worlds)
    if found and first_difference(ranks.single(function, steps, what, size, backend=backend, env=FLOAT32), worlds):
        refute(ranks, what, found[0], SAME, found[1])


def check_course(ranks, worlds, groups, steps, hint=""):
    """AdamW groups went on every rank as torch.optim.AdamW takes them in fp64, within the bound of truth.py."""
    for step, true in enumerate(ranks.single(truth.course, groups, steps)):
        for group in groups:
            unit = truth.UNIT[getattr(torch, group.get("dtype", "float32"))]
            formula = f"{truth.FORMULA}, u = {unit:.3g}, t = {step + 1}"
            for name in (f"{group['name']}[{i}]" for i in range(len(group["shapes"]))):
                for rank, after in enumerate(worlds):
                    ratio, distance, bound = truth.worst(after[step][name], *true[name])
                    if not ratio <= 1:
                        said = f"rank {rank} of {len(worlds)}, step {step}, {name}: off by {distance:.3g}"
                        expected = f"torch.optim.AdamW in fp64 within {bound:.3g}: {formula}"
                        refute(ranks, groups, name, expected, f"{said}, {ratio:.3g} times the bound", hint)
