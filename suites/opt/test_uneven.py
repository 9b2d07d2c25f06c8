"""OPT: AdamW parameters whose dim 0 does not divide by the number of ranks: right, or refused well.

    OPT-06  every rank steps rightly, or every rank refuses
    OPT-07  a refusal names both numbers
    OPT-08  a refusal leaves nothing behind: no collective in flight, no parameter half updated

A refusal that only reads badly ends a run as it should, so 07 and 08 are for those who call the optimizer themselves.
"""

import re

import pytest

from nanochat_gate import requirement, verify
from suites.opt.attempts import uneven
from suites.opt.groups import ADAMW
from suites.opt.judging import check_course, expecting
from suites.steps import FLOAT32

DIM = 97  # prime
NUMBER = r"(?<![\d.:])\d+(?![\d]|[.:]\d)"  # not part of a time or a line number
LARGE = [{"name": "even", "shapes": [[96, 16]], **ADAMW}, {"name": "uneven", "shapes": [[DIM, 16]], **ADAMW}]
SMALL = [{"name": "even", "shapes": [[24, 5]], **ADAMW}, {"name": "uneven", "shapes": [[1], [7], [7, 5]], **ADAMW}]
RIGHT = "every rank takes the step as one process would, or every rank refuses it"


def run(ranks, groups, size, backend):
    with expecting(RIGHT):
        return ranks(uneven, groups, size=size, backend=backend, lane="withheld", env=FLOAT32, fresh=True)


def refused(ranks, size, backend):
    """What the ranks say of LARGE where they refuse it; None where they take it."""
    got = run(ranks, LARGE, size, backend)
    return got if got[0]["refused"] else None


@pytest.mark.parametrize("groups", [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large")])
@requirement("OPT-06", "A dim 0 that does not divide by the ranks is dealt rightly, or refused by all", sizes=(2, 3))
def test_right_or_refused(ranks, groups, size, backend):
    """Rows past the last whole share that nobody updates are tokens that never learn."""
    got = run(ranks, groups, size, backend)
    if not got[0]["refused"]:
        check_course(ranks, [[rank["after"]] for rank in got], groups, 1)


@requirement("OPT-07", "Refusing a dim 0 that does not divide by the ranks names both", level="should", sizes=(3,))
def test_names_both(ranks, size, backend):
    """Without the two numbers, whoever meets the error must read the optimizer to learn what to change."""
    for rank, got in enumerate(refused(ranks, size, backend) or ()):
        named = {int(n) for n in re.findall(NUMBER, got["refused"])}
        verify(
            {DIM, size} <= named,
            f"a refusal that names dim 0, {DIM}, and the number of ranks, {size}",
            f"rank {rank} of {size}: {got['refused']}",
        )


@requirement("OPT-08", "Refusing a step leaves no collective in flight and no update", level="should", sizes=(3,))
def test_leaves_nothing(ranks, size, backend):
    """Who catches the error and goes on meets a stray collective later, or a half-updated model."""
    for rank, got in enumerate(refused(ranks, size, backend) or ()):
        after = f"after {got['refused']}"
        changed = f"rank {rank} of {size}: some were updated {after}"
        verify(got["unchanged"], "parameters as they were before the refused step", changed)
        total = size * (size + 1) / 2
        summed = f"rank {rank} of {size}: {got['sum']} {after}"
        verify(got["sum"] == total, f"an all_reduce of 1 to {size} after the refusal gives {total}", summed)
        pending = f"rank {rank} of {size}: {', '.join(got['pending'][:3])} not waited for {after}"
        verify(not got["pending"], "no collective in flight after the refusal", pending)
