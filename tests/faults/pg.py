"""Faults of the process group: how a run starts and ends."""

from tests.faults.edit import Edit, Fault

COMMON = "nanochat/common.py"

FAULTS = [
    Fault(
        "no-gloo-group",
        "As stock: under torchrun on CPU there is no process group, and every rank trains alone.",
        Edit(
            COMMON,
            "compute_init",
            '_join_group("gloo", rank, world_size)',
            "return ddp, rank, local_rank, world_size, device",
        ),
        ids=("PG-01",),
    ),
]
