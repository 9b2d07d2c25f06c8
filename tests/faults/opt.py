"""Faults of the optimizer's arithmetic and sharding."""

from tests.faults.edit import Edit, Fault

OPTIM = "nanochat/optim.py"

FAULTS = [
    Fault(
        "muon-nesterov-dropped",
        "Muon steps along the averaged gradient of the past instead of looking ahead, and converges more slowly.",
        Edit(OPTIM, "_muon_step", "grads.lerp(momentum_buffer, momentum)", "momentum_buffer.clone()"),
        ids=(),
        uncaught="no requirement on Muon's momentum yet",
    ),
    Fault(
        "adamw-updates-next-ranks-slice",
        "Every rank updates its neighbour's slice of the embeddings with the gradient of its own.",
        Edit(OPTIM, "MuonAdamW._adamw", "p.chunk(N)[rank]", "p.chunk(N)[(rank + 1) % N]"),
        ids=("OPT-01", "OPT-02"),
    ),
]
