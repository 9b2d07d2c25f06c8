"""What the COL suite does in ranks: optimizer steps of the target's own model, with their collectives watched.

watched        the same steps twice, results there at the launch and results withheld until the wait; what differs, and
               every collective of the second run
digests_after  a digest of the parameters after each step, on random gradients
late           steps in which one rank after another is late, against steps in which none is
"""

import hashlib
import itertools
import math
import random
import time
from fractions import Fraction
from types import SimpleNamespace

import numpy
import torch
import torch.distributed as dist

from nanochat_gate import exact
from suites.steps import make_model, set_gradients, set_schedule

STEPS = 2  # what the first step leaves in flight meets the second
LATE = 0.5  # s
SLOW = 0.01  # s


def take_steps(rank, steps, gradients=set_gradients, each=lambda step, named: None, seed=None):
    """Optimizer steps under the schedule; `each(step, named parameters)` after every one. Returns the optimizers.

    seed: for what the target draws by other means than torch, so that it draws the same in each run that is compared.
    """
    if seed is not None:
        random.seed(seed)
        numpy.random.seed(seed)
    model, optimizers = make_model(rank)
    named = dict(model.named_parameters())
    each(-1, named)
    for step in range(steps):
        set_schedule(optimizers, step)
        gradients(rank, named, step)
        for optimizer in optimizers:
            optimizer.step()
        each(step, named)
        for parameter in named.values():
            parameter.grad = None
    return optimizers


def run(rank, steps):
    """Steps on exact gradients: copies of all parameters after each, the collectives before each, the optimizers."""
    made = SimpleNamespace(after=[], ends=[])

    def end(step, named):
        made.ends.append(len(rank.recorder.events))
        if step >= 0:
            made.after.append({name: p.detach().clone() for name, p in named.items()})

    made.optimizers = take_steps(rank, steps, each=end, seed=rank.rank)
    return made


def difference(want, got):
    """(number of the first step after which parameters differ in any bit, how), or (len(want), "")."""
    for step, (a, b) in enumerate(zip(want, got, strict=True)):
        if names := exact.differing(a, b):
            return step, f"after step {step}: {exact.summary(a, b, names)}"
    return len(want), ""


def watched(rank, steps):
    """Plain data on what collectives did in `steps` steps with their results withheld until the wait.

    steps:    the events of each step (see observe.Recorder); setup: those before the first.
    differs:  what is not as when results are there at the launch, "" when nothing; blamed: whose result it is.
    bytes:    what a step sends per rank as ZeRO has it, padding counted: (numerator, denominator).
    """
    recorder = rank.recorder
    with recorder.prompt():
        want = run(rank, steps).after
    recorder.clear()
    got = run(rank, steps)
    events, bypassed = recorder.events, recorder.bypassed
    first, differs = difference(want, got.after)
    first, count = _lowest(rank, first), _lowest(rank, len(events))
    blamed = _blamed(rank, want[: first + 1], count) if first < steps else ""
    if blamed is None:
        differs, blamed = f"no two runs agree, not even with results at the launch; {differs}", ""
    ideal = zero_bytes(got.optimizers, rank.size)
    return {
        "setup": events[: got.ends[0]],
        "steps": [events[start:stop] for start, stop in itertools.pairwise(got.ends)],
        "bypassed": bypassed,
        "differs": differs,
        "blamed": blamed,
        "bytes": [ideal.numerator, ideal.denominator],
    }


def _lowest(rank, value):
    """The lowest of what the ranks say."""
    with rank.recorder.quiet():
        agreed = torch.tensor([float(value)], device=rank.device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return int(agreed)


def _blamed(rank, want, count):
    """The target's line of the first collective that makes a difference when it alone is withheld, "" if none does.

    None where there is a difference without any withheld.
    """
    for number in (None, *range(count)):
        rank.recorder.clear()
        with rank.recorder.prompt(but=number):
            got = run(rank, len(want)).after
        if not _lowest(rank, difference(want, got)[1] == ""):
            return None if number is None else rank.recorder.events[number]["where"]
    return ""


def zero_bytes(optimizers, size):
    """2*S*(N-1)/N, S the bytes of all parameters, those dealt whole or in rows padded up to a multiple of N.

    ZeRO reduces each gradient (S*(N-1)/N sent per rank) and gathers each parameter (as much again), which is also what
    an all-reduce sends. Muon deals matrices of one shape, so K of them count as ceil(K/N)*N; AdamW deals rows, so a
    first dim that does not divide counts as the next that does.
    """
    total = 0
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            shapes = {}
            for p in group["params"]:
                shapes.setdefault((tuple(p.shape), p.element_size()), []).append(p)
            muon = group.get("use_muon", group.get("kind", type(optimizer).__name__.lower()).endswith("muon"))
            for (shape, element_size), alike in shapes.items():
                if muon:
                    total += math.ceil(len(alike) / size) * size * alike[0].numel() * element_size
                elif shape and alike[0].numel() >= size:
                    rows = math.ceil(shape[0] / size) * size
                    total += len(alike) * rows * math.prod(shape[1:]) * element_size
                else:
                    total += len(alike) * alike[0].numel() * element_size
    return Fraction(2 * total * (size - 1), size)


def random_gradients(rank, named, step):
    """Gradients whose sums round, so that another order of adding them up gives other bits."""
    for name, parameter in named.items():
        seed = int.from_bytes(hashlib.sha256(f"{rank.rank}/{step}/{name}".encode()).digest()[:7], "big")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.grad = values.to(device=parameter.device, dtype=parameter.dtype)


def digests_after(rank, steps):
    """A digest of every parameter after each step on random gradients."""
    digests = []

    def keep(step, named):
        if step >= 0:
            digests.append({name: exact.bits(p) for name, p in named.items()})

    take_steps(rank, steps, gradients=random_gradients, each=keep)
    return digests


def late(rank, who):
    """Take steps in which the ranks `who` are late in turn; what is then not as in steps in which nobody is.

    The late one sleeps before its first reduce and before its first gather, long enough for whoever does not wait for
    it to be done with the step, and a little before every other launch.
    """
    want = run(rank, len(who)).after
    seen, got = set(), []

    def dawdle(event):
        kind = "gather" in event["op"]
        time.sleep(SLOW if kind in seen else LATE)
        seen.add(kind)

    def each(step, named):
        if step >= 0:
            got.append({name: p.detach().clone() for name, p in named.items()})
        seen.clear()
        rank.recorder.before = dawdle if step + 1 < len(who) and rank.rank == who[step + 1] else None

    rank.recorder.clear()
    take_steps(rank, len(who), each=each, seed=rank.rank)
    step, differs = difference(want, got)
    return f"rank {who[step]} late in step {step}: {differs}" if differs else ""
