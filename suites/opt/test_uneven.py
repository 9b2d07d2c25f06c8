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


def run(ranks, groups, size, backend, probe=False):
    return ranks(uneven, groups, probe, size=size, backend=backend, lane="withheld", env=FLOAT32, fresh=True)


@pytest.mark.parametrize("parameters", ["small", "large"])
@requirement("OPT-06", "A dim 0 that does not divide by the ranks is dealt rightly, or refused by all", sizes=(2, 3))
def test_right_or_refused(ranks, parameters, size, backend):
    """Rows past the last whole share that nobody updates are tokens that never learn."""
    groups = SMALL if parameters == "small" else LARGE
    with expecting("every rank takes the step as one process would, or every rank refuses it"):
        got = run(ranks, groups, size, backend)
    if not got[0]["refused"]:
        check_course(ranks, [[rank["after"]] for rank in got], groups, 1)


@requirement("OPT-07", "Refusing a dim 0 that does not divide by the ranks names both", level="should", sizes=(2, 3))
def test_names_both(ranks, size, backend):
    """Without the two numbers, whoever meets the error must read the optimizer to learn what to change."""
    for rank, got in enumerate(run(ranks, LARGE, size, backend)):
        if got["refused"]:
            named = {int(n) for n in re.findall(NUMBER, got["refused"]["text"])}
            verify(
                {DIM, size} <= named,
                f"a refusal that names dim 0, {DIM}, and the number of ranks, {size}",
                f"rank {rank} of {size}: {got['refused']['text']}",
                where=got["refused"]["where"],
            )


@requirement("OPT-08", "Refusing a step leaves no collective in flight and no update", level="should", sizes=(2,))
def test_leaves_nothing(ranks, size, backend):
    """Who catches the error and goes on meets a stray collective later, or a half-updated model."""
    total = size * (size + 1) / 2
    with expecting(f"an all_reduce of 1 to {size} after the step gives {total}"):
        worlds = run(ranks, LARGE, size, backend, True)
        for rank, got in enumerate(worlds):
            verify(got["sum"] == total, "", f"rank {rank} of {size}: it gives {got['sum']}")
    for rank, got in enumerate(worlds):
        if got["refused"]:
            after, where = f"after {got['refused']['text']}", got["refused"]["where"]
            changed = f"rank {rank} of {size}: some were updated {after}"
            verify(got["unchanged"], "parameters as they were before the refused step", changed, where=where)
            pending = f"rank {rank} of {size}: {', '.join(got['pending'][:3])} not waited for {after}"
            verify(not got["pending"], "no collective in flight after the refusal", pending, where=where)
