"""PG: the same in processes that torch's own launcher started, each with a PYTHONHASHSEED of its own.

One run of `life` serves all of it, since starting torchrun costs seconds.

PG-16  a Gloo group of all ranks, and none left after compute_cleanup
PG-17  the 5-tuple
PG-18  initial weights bit-equal on all ranks
PG-19  the collectives of an optimizer step are the same, in the same order, on all ranks
"""

import os
from pathlib import Path

import torch.distributed as dist

from nanochat_gate import NotTested, Violation, requirement, verify, wire
from nanochat_gate.observe import signature
from suites.pg.start import initial_weights, needs_init, provide, start, verify_equal, verify_tuple
from suites.pg.test_group import verify_group
from suites.steps import set_gradients


def life(rank, folder):
    """A run from compute_init to compute_cleanup, with one optimizer step.

    What is known before the step is also left in `folder`: a step whose collectives do not pair up ends the process.
    """
    said = {"hash": hash("nanochat"), "made": start(rank, "cpu")}
    provide(rank)
    # So many layers that no two orders of their names agree by chance.
    model, said["weights"] = initial_weights(rank, n_layer=12)
    os.makedirs(folder, exist_ok=True)
    with open(early(folder, rank.rank), "wb") as file:
        file.write(wire.pack(said))
    optimizers = rank.target.optimizers(model)
    rank.recorder.clear()
    set_gradients(rank, dict(model.named_parameters()), 0)
    for optimizer in optimizers:
        optimizer.step()
    said["collectives"] = [f"{signature(event)}  {event['where']}" for event in rank.recorder.events]
    said["bypassed"] = list(rank.recorder.bypassed)
    rank.target.compute_cleanup()
    return said | {"left": dist.is_initialized()}


def early(folder, rank):
    return os.path.join(folder, f"rank{rank}.early")


def lives(ranks, size, whole=False):
    """What each rank of the one run under torchrun reported; the Violation it ended in, where it did.

    whole: to the end; else what is known from before the step is enough.
    """
    folder = str(ranks.gate.folder / f"pg-torchrun-{size}")

    def run():
        try:
            return {"ranks": ranks.torchrun(life, folder, size=size, group=None, lane="withheld")}
        except Violation as error:
            files = [Path(early(folder, rank)) for rank in range(size)]
            known = [wire.unpack(file.read_bytes()) for file in files if file.exists()]
            return {"ranks": known, "violation": vars(error)}

    got = ranks.gate.shared(f"pg-torchrun-{size}", run)
    if "violation" in got and (whole or len(got["ranks"]) < size):
        raise Violation(**got["violation"])
    if len({said["hash"] for said in got["ranks"]}) < size:
        raise NotTested("the ranks share a PYTHONHASHSEED, which hides what depends on the order of a set")
    return got["ranks"]


@requirement("PG-16", "Real torchrun on CPU: a Gloo group of all ranks, from init to cleanup", claim="cpu", sizes=(2,))
def test_group(ranks, size):
    """The gate's own ranks could differ from torchrun's in just what a fork's compute_init looks at."""
    for rank, said in enumerate(lives(ranks, size)):
        verify_group(ranks, said["made"], rank, size, "gloo")
        where = ranks.facts.where.get("compute_cleanup", "")
        left = said.get("left", False)
        verify(not left, "no process group after compute_cleanup", "it is still there", where=where)


@requirement("PG-17", "Real torchrun: compute_init returns its rank, local rank and world size", sizes=(2,))
def test_tuple(ranks, size):
    """Data is dealt by these numbers: a wrong rank reads what another one trains on."""
    needs_init(ranks)
    for rank, said in enumerate(lives(ranks, size)):
        given = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={size}"
        verify_tuple(ranks, said["made"]["tuple"], [True, rank, rank, size, "cpu"], given)


@requirement("PG-18", "Real torchrun: initial weights are bit-equal on all ranks", sizes=(2,))
def test_weights(ranks, size):
    """What is drawn in the order of a set is equal among forks of one process and differs among torchrun's ranks."""
    needs_init(ranks)
    verify_equal(ranks, [said["weights"] for said in lives(ranks, size)])


@requirement("PG-19", "Real torchrun: every rank issues the same collectives in the same order", sizes=(2,))
def test_collectives(ranks, size):
    """Collectives in the order of a set pair up wrongly: a hang, or gradients added to other parameters."""
    said = lives(ranks, size, whole=True)
    calls = [of_rank["collectives"] for of_rank in said]
    if bypassed := [call for of_rank in said for call in of_rank["bypassed"]]:
        raise NotTested(f"not observed: {bypassed[0]}")
    expected = f"all {size} ranks issue the same {len(calls[0])} collectives in an optimizer step, in the same order"
    verify(bool(calls[0]), "an optimizer step communicates", "it issues no collective: every rank trains alone")
    for rank, own in enumerate(calls[1:], 1):
        for number, (first, other) in enumerate(zip(calls[0], own, strict=False)):
            (call, _, _), (other_call, _, where) = first.partition("  "), other.partition("  ")
            differ = f"call {number}: rank 0 {call}, rank {rank} {other_call}"
            verify(call == other_call, expected, differ, where=where)
        verify(len(own) == len(calls[0]), expected, f"rank {rank} issues {len(own)}")
