"""OPT: the optimizer's state is sharded: what each rank holds, measured.

OPT-15  at most ceil(K/N) matrices' worth of momentum and 1/N of AdamW's moments, small tensors replicated
"""

from nanochat_gate import Unsupported, requirement, verify
from suites.steps import FLOAT32, make_model, set_gradients

SMALL = 1024  # elements below which nanochat keeps AdamW's moments whole on every rank


def held(rank):
    """After one step, per group: its kind, its parameters' shapes, the elements of its state on this rank."""
    model, optimizers = make_model(rank)
    set_gradients(rank, dict(model.named_parameters()), 0)
    groups = []
    for optimizer in optimizers:
        optimizer.step()
        for group in optimizer.param_groups:
            kind = group.get("kind") or ("muon" if "momentum" in group else "adamw")
            states = [optimizer.state[p] for p in group["params"] if p in optimizer.state]
            # One element is a step counter, or nothing worth sharding.
            tensors = [t for state in states for t in state.values() if hasattr(t, "numel") and t.numel() > 1]
            shapes = [list(p.shape) for p in group["params"]]
            groups.append({"kind": kind, "shapes": shapes, "held": sum(t.numel() for t in tensors)})
    return groups


def numel(shape):
    total = 1
    for n in shape:
        total *= n
    return total


def allowed(group, size):
    """Elements of state that a rank of `size` may hold for a group."""
    if group["kind"] == "muon":  # momentum, and a second moment per row or per column, of ceil(K/N) matrices per shape
        shapes = [tuple(shape) for shape in group["shapes"]]
        return sum(-(-shapes.count(s) // size) * (numel(s) + max(s)) for s in set(shapes))
    total = 0
    for shape in group["shapes"]:
        rows = shape[0] if shape else 1
        total += 2 * (numel(shape) if numel(shape) < SMALL else -(-rows // size) * numel(shape[1:]))
    return total


@requirement("OPT-15", "Each rank holds no more than its share of the optimizer's state", sizes=(2, 3, 4))
def test_share(ranks, size, backend):
    """State that every rank keeps whole runs out of memory at the model size that sharding was meant for."""
    for rank, groups in enumerate(ranks(held, size=size, backend=backend, lane="withheld", env=FLOAT32)):
        total, limit = sum(g["held"] for g in groups), sum(allowed(g, size) for g in groups)
        if not total:
            raise Unsupported("the optimizers keep no tensors in `state`, so what a rank holds cannot be measured")
        whole = sum(allowed(g, 1) for g in groups)
        most = max(groups, key=lambda g: g["held"] - allowed(g, size))
        verify(
            total <= limit,
            f"at most {limit} elements of state: of K matrices ceil(K/{size}), of AdamW 2/{size}, small ones whole",
            f"rank {rank} of {size} holds {total} of {whole}; furthest above its share: {len(most['shapes'])} "
            f"{most['kind']} parameters {most['shapes'][0]} with {most['held']}, {allowed(most, size)} allowed",
        )
