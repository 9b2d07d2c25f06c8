"""Steps that a target may refuse: what ranks run, and whether all of them went the same way."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from nanochat_gate import exact
from nanochat_gate.rank import describe
from suites.opt.groups import build
from suites.steps import require_observed, set_gradients

PATIENCE = 5.0  # s from one rank's refusal until all others must have refused too


def attempt(rank, do):
    """Run do(): None when it returned, its error's text and where when every rank raised; raises it where others go on.

    Works once in a world, so call with fresh=True. The ranks of a world share TMPDIR.
    """
    try:
        do()
    except Exception as error:
        folder = Path(os.environ["TMPDIR"])
        (folder / f"refused-{rank.rank}").touch()
        deadline = time.monotonic() + PATIENCE
        while len(list(folder.glob("refused-*"))) < rank.size:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        said = describe(error, rank.target)
        return {"text": said["text"], "where": said["where"]}
    return None


def bits(named):
    return {name: exact.bits(parameter) for name, parameter in named.items()}


def uneven(rank, groups, probe=False):
    """One step on hand-built groups that cannot all be dealt evenly; what became of parameters and of collectives.

    probe: all_reduce rank + 1 afterwards, as `sum`.
    """
    named, optimizers = build(rank, groups)
    before = bits(named)
    set_gradients(rank, named, 0)

    def step():
        for optimizer in optimizers:
            optimizer.step()

    refused = attempt(rank, step)
    pending = [f"{e['op']} at {e['where']}" for e in rank.recorder.events if not e["waited"]]
    require_observed(rank)
    out = {"refused": refused, "pending": pending, "unchanged": bits(named) == before}
    out["after"] = {name: p.detach().clone().cpu() for name, p in named.items()}
    if probe:
        with rank.recorder.quiet():
            total = torch.full((5,), float(rank.rank + 1), device=rank.device)
            dist.all_reduce(total)
        out["sum"] = float(total[0]) if bool((total == total[0]).all()) else float("nan")
    return out


def missing(rank, groups, name, which):
    """Three steps in which parameter `name` has no gradient on the ranks `which`; bits after, or the refusal."""
    named, optimizers = build(rank, groups)

    def steps():
        for step in range(3):
            set_gradients(rank, named, step)
            if rank.rank in which:
                named[name].grad = None
            for optimizer in optimizers:
                optimizer.step()

    refused = attempt(rank, steps)
    return {"refused": refused, "bits": bits(named)}
