"""OPT: all ranks hold the same bits after every step.

OPT-12  with random, inexact gradients that differ on every rank
OPT-13  with a gradient missing on one rank
OPT-14  with a gradient missing on all ranks
"""

import pytest
import torch

from nanochat_gate import exact, requirement, verify
from suites.opt.attempts import missing
from suites.opt.groups import ADAMW, MUON
from suites.opt.judging import expecting, refute
from suites.steps import FLOAT32, make_model, require_observed, set_schedule

GROUPS = [
    {"name": "small", "shapes": [[12], [24, 5]], **ADAMW},
    {"name": "large", "shapes": [[96, 16], [96, 32]], **ADAMW},
    {"name": "matrix", "shapes": [[12, 12]] * 3, **MUON},
]
CONFIG = {"n_layer": 2}
ALIKE = "every rank refuses the step, or all take it and stay bit-equal"
kinds = pytest.mark.parametrize("name", ["small[1]", "large[1]", "matrix[1]"])


def random_steps(rank, steps):
    """Bits of every parameter of the target's own model after each step on gradients that only this rank has."""
    model, optimizers = make_model(rank, CONFIG)
    named = dict(model.named_parameters())
    torch.manual_seed(rank.rank)
    after = []
    for step in range(steps):
        set_schedule(optimizers, step)
        for parameter in named.values():
            parameter.grad = torch.randn_like(parameter) * 10.0 ** (step - 2)
        for optimizer in optimizers:
            optimizer.step()
        after.append({name: exact.bits(parameter) for name, parameter in named.items()})
    require_observed(rank)
    return after


def unequal(first, other):
    return [name for name in first if first[name] != other[name]]


@requirement("OPT-12", "All ranks hold the same bits after every step, whatever their gradients", sizes=(2, 3))
def test_inexact(ranks, size, backend):
    """Ranks that drift apart train several models at once, and the checkpoint is rank 0's alone."""
    worlds = ranks(random_steps, 3, size=size, backend=backend, lane="withheld", env=FLOAT32)
    for rank, after in enumerate(worlds):
        for step, (first, other) in enumerate(zip(worlds[0], after, strict=True)):
            names = unequal(first, other)
            if names:
                said = f"rank {rank} of {size} differs from rank 0 after step {step} in {len(names)} of {len(first)}"
                expected = "every parameter bit-equal on all ranks after every step"
                refute(ranks, CONFIG, names[0], expected, f"{said} parameters: {', '.join(names[:3])}")


def check_missing(ranks, name, which, size, backend):
    with expecting(ALIKE):
        got = ranks(missing, GROUPS, name, which, size=size, backend=backend, lane="withheld", env=FLOAT32, fresh=True)
    for rank, one in enumerate(got):
        names = unequal(got[0]["bits"], one["bits"]) if not one["refused"] else []
        verify(not names, ALIKE, f"rank {rank} of {size} differs from rank 0 in {', '.join(names[:3])}")


@kinds
@requirement("OPT-13", "A gradient missing on one rank is handled alike on all", level="should", sizes=(2,))
def test_missing_on_one(ranks, name, size, backend):
    """A branch of the model that only one rank's data takes leaves the others waiting for ever."""
    check_missing(ranks, name, [1], size, backend)


@kinds
@requirement("OPT-14", "A gradient missing on all ranks is handled alike on all", level="should", sizes=(2,))
def test_missing_on_all(ranks, name, size, backend):
    """A frozen parameter must not make ranks disagree on which collectives a step has."""
    check_missing(ranks, name, list(range(size)), size, backend)
