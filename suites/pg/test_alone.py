"""PG: one process, started without torchrun.

PG-04  no process group without torchrun's environment
PG-05  nor with a part of it (should)
"""

import os

import torch.distributed as dist

from nanochat_gate import Unsupported, requirement, verify
from suites.pg.start import RAISES, shown, start

ALONE = [False, 0, 0, 1, "cpu"]


def start_in_each(rank, environments):
    """One start per environment, each with just these variables on top of none of torchrun's."""
    made = []
    for environment in environments:
        os.environ |= environment
        made.append(start(rank, "cpu"))
        if dist.is_initialized():
            dist.destroy_process_group()
        for name in environment:
            del os.environ[name]
    return made


def starts(ranks, *environments):
    made = ranks(start_in_each, environments, size=1, group=None, torchrun=False, fresh=True)[0]
    # A target that claims no CPU may refuse one; what it then does with other environments says nothing more.
    if made[0]["raised"] and not environments[0] and "cpu" not in ranks.facts.claims:
        raise Unsupported(f"on CPU {RAISES} {made[0]['raised']}")
    return made


def verify_alone(ranks, made, given):
    if made["raised"]:
        does = f"raises {made['raised']}"
    elif made["size"]:
        does = f"makes a {made['backend']} group of {made['size']}"
    else:
        does = f"makes no group and returns {shown(made['tuple'])}"
    should = f"makes no group and returns {shown(ALONE)}"
    verify(
        does == should,
        f"with {given} compute_init {should}",
        f"with {given} compute_init {does}",
        where=ranks.facts.where.get("compute_init", ""),
    )


@requirement("PG-04", "compute_init makes no process group without torchrun's environment")
def test_without_torchrun(ranks):
    """A single process that takes itself for a rank waits for others that never come."""
    verify_alone(ranks, starts(ranks, {})[0], "no variable of torchrun set")


PARTS = ({"RANK": "1"}, {"LOCAL_RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "2"})


@requirement("PG-05", "A part of torchrun's environment, as RANK alone, is not torchrun", level="should")
def test_part_of_the_environment(ranks):
    """Schedulers leave RANK or WORLD_SIZE behind; a single process started there must not wait for other ranks."""
    for environment, made in zip(PARTS, starts(ranks, {}, *PARTS)[1:], strict=True):
        verify_alone(ranks, made, f"only {' and '.join(environment)} set")
