"""OPT: the optimizer's state is sharded: what each rank holds, measured.

OPT-15  at most ceil(K/N) matrices' worth of momentum and 1/N of AdamW's moments, small tensors replicated
"""

import torch

from nanochat_gate import Unsupported, requirement
from suites.opt.judging import refute
from suites.steps import FLOAT32, make_model, set_gradients

SMALL = 1024  # elements below which nanochat keeps AdamW's moments whole on every rank


def elements(value):
    """Elements of all tensors in a state; those of a single one are step counters, or not worth sharding."""
    if isinstance(value, torch.Tensor):
        return value.numel() if value.numel() > 1 else 0
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(elements, value)) if isinstance(value, (list, tuple)) else 0


def held(rank):
    """After one step: the elements of state on this rank, and per group its kind, first parameter, shapes, elements."""
    model, optimizers = make_model(rank)
    named = dict(model.named_parameters())
    names = {p: name for name, p in named.items()}
    set_gradients(rank, named, 0)
    out = {"total": 0, "groups": []}
    for optimizer in optimizers:
        optimizer.step()
        out["total"] += elements(dict(optimizer.state))
        for group in optimizer.param_groups:
            params = group["params"]
            if params:
                kind = group.get("kind") or ("muon" if "momentum" in group else "adamw")
                mine = elements([optimizer.state[p] for p in params if p in optimizer.state])
                shapes = [list(p.shape) for p in params]
                out["groups"].append({"kind": kind, "first": names[params[0]], "shapes": shapes, "held": mine})
    return out


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


@requirement("OPT-15", "Each rank holds no more than its share of the optimizer's state", sizes=(2, 3))
def test_share(ranks, size, backend):
    """State that every rank keeps whole runs out of memory at the model size that sharding was meant for."""
    for rank, got in enumerate(ranks(held, size=size, backend=backend, lane="withheld", env=FLOAT32)):
        total, groups = got["total"], got["groups"]
        limit = sum(allowed(g, size) for g in groups)
        if not total:
            raise Unsupported("the optimizers keep no tensors in `state`, so what a rank holds cannot be measured")
        whole = sum(allowed(g, 1) for g in groups)
        if total > limit:
            most = max(groups, key=lambda g: g["held"] - allowed(g, size))
            what = f"{len(most['shapes'])} {most['kind']} parameters {most['shapes'][0]} with {most['held']}"
            refute(
                ranks,
                {},
                most["first"],
                f"at most {limit} elements of state: of K matrices ceil(K/{size}), of AdamW 2/{size}, small ones whole",
                f"rank {rank} of {size} holds {total} of {whole}; furthest above its share: {what}, "
                f"{allowed(most, size)} allowed",
            )
