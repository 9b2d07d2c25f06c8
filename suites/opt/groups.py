"""What ranks run for the OPT suite: steps on the target's own model or on hand-built groups of parameters.

A group is written as a dict of plain values: its `name`, its parameters' `shapes`, their `dtype` (float32 when left
out), and what the optimizer is to know of it: `kind` "adamw" with lr, betas, eps, weight_decay, or "muon" with lr,
momentum, ns_steps, beta2, weight_decay. Parameters are called `name[i]` and start at the same values on all ranks.
"""

from nanochat_gate import exact
from suites.steps import make_model, require_observed, run_steps

MUON = {"kind": "muon", "lr": 0.0625, "momentum": 0.95, "ns_steps": 5, "beta2": 0.9, "weight_decay": 0.25}
ADAMW = {"kind": "adamw", "lr": 0.125, "betas": [0.8, 0.95], "eps": 1e-10, "weight_decay": 0.125}


def start(shape, name):
    """Where a parameter starts: multiples of 1/64 in [-1, 1], exact in bf16 too."""
    return exact.integers(shape, 64, "start", name).float() / 64


def build(rank, groups):
    """(name -> parameter, the target's optimizers over the groups)."""
    import torch

    named, made = {}, []
    for group in groups:
        options = {k: v for k, v in group.items() if k not in ("name", "shapes", "dtype")}
        if "betas" in options:
            options["betas"] = tuple(options["betas"])
        dtype = getattr(torch, group.get("dtype", "float32"))
        names = [f"{group['name']}[{i}]" for i in range(len(group["shapes"]))]
        for name, shape in zip(names, group["shapes"], strict=True):
            named[name] = torch.nn.Parameter(start(shape, name).to(device=rank.device, dtype=dtype))
        made.append({**options, "params": [named[name] for name in names]})
    return named, rank.target.build_optimizers(made)


def cut(optimizers, ranks):
    """Cut each group of stacked matrices into the shares that ranks own, for one process to step share by share."""
    for optimizer in optimizers:
        for group in list(optimizer.param_groups):
            params, share = group["params"], -(-len(group["params"]) // ranks)
            if group.get("kind") == "muon" and share < len(params):
                group["params"] = params[:share]
                rest = [params[i : i + share] for i in range(share, len(params), share)]
                optimizer.param_groups += [{**group, "params": part} for part in rest]


def step_of(rank, what, name):
    """`file.py:12` of the step() that updates parameter `name` of hand-built groups, or of the model of a config."""
    if isinstance(what, list):
        named, optimizers = build(rank, what)
    else:
        model, optimizers = make_model(rank, what)
        named = dict(model.named_parameters())
    for optimizer in optimizers:
        if any(p is named[name] for group in optimizer.param_groups for p in group["params"]):
            return rank.target.where(type(optimizer).step)
    return ""


def model_parity(rank, steps, config, shares=1):
    """Steps of the target's own model; with `shares` in one process, by the shares that so many ranks own."""
    model, optimizers = make_model(rank, config)
    cut(optimizers, shares)
    after = run_steps(rank, dict(model.named_parameters()), optimizers, steps)
    require_observed(rank)
    return after


def group_parity(rank, steps, groups, shares=1):
    """Like model_parity, on hand-built groups."""
    named, optimizers = build(rank, groups)
    cut(optimizers, shares)
    after = run_steps(rank, named, optimizers, steps)
    require_observed(rank)
    return after
