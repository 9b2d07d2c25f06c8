"""PG: what compute_init makes of torchrun's environment.

PG-01  a Gloo group of all ranks on CPU
PG-02  the 5-tuple, also where a rank's place on its node is not its rank
PG-03  an NCCL group on GPUs, each rank on its own
"""

import os

import pytest
import torch
import torch.distributed as dist

from nanochat_gate import requirement, verify
from suites.pg.start import needs_init, start, verify_tuple, what_happened


def start_once(rank):
    rank.rendezvous()
    return start(rank)


@pytest.mark.core
@requirement("PG-01", "Under torchrun on CPU compute_init makes a Gloo group", claim="cpu", sizes=(2, 3, 4, 1))
def test_gloo_group(ranks, size):
    """Without a group every rank silently trains alone, and throughput still seems to grow with the ranks."""
    for rank, made in enumerate(ranks(start_once, size=size, group=None, fresh=True)):
        if size == 1 and not made["size"] and made["tuple"][:4] == [False, 0, 0, 1]:
            continue  # one process that says it is no distributed run trains as one
        verify_group(ranks, made, rank, size, "gloo")


def verify_group(ranks, made, rank, size, backend):
    total = size * (size + 1) // 2
    right = not made["raised"] and (made["size"], made["number"], made["backend"]) == (size, rank, backend)
    verify(
        right,
        f"a {backend} group of all {size} ranks, in which RANK={rank} is rank {rank}",
        what_happened(made),
        where=ranks.facts.where.get("compute_init", ""),
    )
    verify(made["total"] == total, f"an all_reduce of 1..{size} in the group gives {total}", f"{made['total']}")


def start_on_two_nodes(rank):
    """As torchrun on two machines sets it: the first half of the ranks on one, the others on the next."""
    per_node = (rank.size + 1) // 2
    os.environ |= {
        "LOCAL_RANK": str(rank.rank % per_node),
        "GROUP_RANK": str(rank.rank // per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
    }
    rank.rendezvous()
    return start(rank)["tuple"]


@requirement("PG-02", "compute_init returns the rank, local rank and world size that torchrun gave", sizes=(2, 3, 4))
def test_tuple(ranks, size):
    """On two machines a rank taken for its place on the node picks a GPU that is not there, or another rank's data."""
    needs_init(ranks)
    per_node = (size + 1) // 2
    for rank, got in enumerate(ranks(start_on_two_nodes, size=size, group=None, fresh=True)):
        local = rank % per_node
        given = f"RANK={rank} LOCAL_RANK={local} WORLD_SIZE={size}"
        verify_tuple(ranks, got, [True, rank, local, size, "cpu"], given)


def start_on_gpu(rank):
    rank.rendezvous()
    made = start(rank)
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    return made | {"bound": str(bound or ""), "current": torch.cuda.current_device()}


@requirement("PG-03", "compute_init makes an NCCL group bound to cuda:LOCAL_RANK", claim="cuda", sizes=(1, 2, 4))
def test_nccl_group(ranks, size):
    """Two ranks on one GPU hang in their first collective, or train at half speed beside an idle GPU."""
    for rank, made in enumerate(ranks(start_on_gpu, size=size, backend="nccl", group=None, fresh=True)):
        verify_group(ranks, made, rank, size, "nccl")
        where, device = ranks.facts.where.get("compute_init", ""), f"cuda:{rank}"
        verify(made["current"] == rank, f"{device} made current", f"cuda:{made['current']} is", where=where)
        verify(made["bound"] in ("", device), f"the group bound to {device}", f"bound to {made['bound']}", where=where)
        given = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={size}"
        verify_tuple(ranks, made["tuple"], [True, rank, rank, size, device], given)
