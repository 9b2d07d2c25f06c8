"""PG: compute_cleanup.

PG-06  destroys the group there is
PG-07  does nothing in a single process
PG-08  does nothing under torchrun before a group is made and after it has gone (should)
PG-09  compute_init can follow it (should)
"""

import pytest
import torch.distributed as dist

from nanochat_gate import Violation, requirement, verify
from suites.pg.start import start, what_happened


def clean_up(rank):
    before = dist.is_initialized()
    if before:
        dist.barrier()  # or a rank destroys the group before another has joined it
    rank.target.compute_cleanup()
    return [before, dist.is_initialized()]


@pytest.mark.core
@requirement("PG-06", "compute_cleanup destroys the process group", sizes=(2, 3))
def test_destroys(ranks, size, backend):
    """A group left open makes a finished run end with a warning, a hang of NCCL's threads, or an error code."""
    for before, after in ranks(clean_up, size=size, backend=backend, fresh=True):
        assert before
        where = ranks.facts.where.get("compute_cleanup", "")
        verify(not after, "no process group after compute_cleanup", "it is still there", where=where)


@requirement("PG-07", "compute_cleanup does nothing in a single process")
def test_single_process(ranks):
    """A script run without torchrun would end in a traceback after it has trained."""
    ranks(clean_up_nothing, "in a single process", size=1, group=None, torchrun=False, fresh=True)


def clean_up_nothing(rank, when):
    try:
        rank.target.compute_cleanup()
    except Exception as error:
        raise Violation(
            "compute_cleanup does nothing where there is no group",
            " ".join(f"{when} compute_cleanup raises {type(error).__name__}: {error}".split()).rstrip(":"),
            where=rank.target.where(rank.target.module("common").compute_cleanup),
        ) from error


def clean_up_without_group(rank):
    clean_up_nothing(rank, "before a group is made")
    rank.rendezvous()
    rank.join()
    dist.barrier()
    rank.target.compute_cleanup()
    clean_up_nothing(rank, "after the group has gone")


@requirement("PG-08", "compute_cleanup under torchrun tolerates that there is no group", level="should", sizes=(2,))
def test_nothing_to_destroy(ranks, size):
    """A run that fails before its group is made shows the cleanup's error in place of its own."""
    ranks(clean_up_without_group, size=size, group=None, fresh=True)


def start_again(rank, times):
    made = []
    for _ in range(times):
        rank.rendezvous()
        made.append(start(rank))
        if not dist.is_initialized():
            break
        rank.target.compute_cleanup()
        made[-1]["left"] = dist.is_initialized()
    return made


@requirement("PG-09", "compute_init can follow compute_cleanup", level="should", claim="cpu", sizes=(2,))
def test_again(ranks, size):
    """A notebook, or a test run that trains twice, cannot start the second time."""
    total = size * (size + 1) // 2
    for of_rank in ranks(start_again, 3, size=size, group=None, fresh=True):
        for time, made in enumerate(of_rank, 1):
            left = made.get("left", False)
            verify(
                made["size"] == size and made["total"] == total and not left,
                f"start {time} of 3 makes a group of {size} that works and that compute_cleanup ends",
                what_happened(made) + (", and compute_cleanup leaves it" if left else ""),
            )
