"""Faults of the collectives: what is waited for, in which order, and with what."""

from tests.faults.edit import Edit, Fault

OPTIM = "nanochat/optim.py"

FAULTS = [
    Fault(
        "reduce-sums",
        "Gradients are summed instead of averaged over ranks, as if the learning rate of a momentum grew with them.",
        Edit(OPTIM, "_reduce_scatter", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
        ids=("OPT-01", "OPT-02"),
    ),
]
