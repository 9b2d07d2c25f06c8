"""OPT: Muon's update against what Muon is: an orthogonalised step along the averaged gradient, of a stated length.

    OPT-18  singular values of update / (lr * sqrt(max(1, m/n))) lie in a band, tall, wide and square
    OPT-19  the update descends along each of the gradient's own singular directions
    OPT-20  momentum carries past gradients on, as much as the group says at that step
    OPT-21  Nesterov's look-ahead (should: a fork may leave it out on purpose)
    OPT-23  weight decay only shrinks, by at most lr * sqrt(max(1, m/n)) * the weight_decay of the step
    OPT-24  a matrix's update does not depend on the matrices it is stacked with

Gradients are U diag(s) V' with U and V from Hadamard matrices, so that all entries of U and V have one magnitude. Then
all rows have one norm, and all columns, before and after: rescaling rows or columns (MuonEq, NorMuon) leaves them as
they are, and the update is U diag(f(s)) V' for whatever odd f a target's iteration amounts to.

The band is [0.5, 1.5], as the author of Muon states it (kellerjordan.github.io/posts/muon). Five quintic steps with
(3.4445, -4.7750, 2.0315) take [0.01, 1] into [0.68, 1.14]; Polar Express does better; the rest is room for bf16. s
falls to 1/32 of its largest, so an update that was not orthogonalised leaves the band at one end. For tall matrices of
128 x 8 the factor is 4, more than the band is wide, so a length that leaves it out or has it elsewhere does not fit.
"""

import torch

from nanochat_gate import Unsupported, requirement
from suites.opt.groups import MUON, build, start
from suites.opt.judging import refute
from suites.steps import FLOAT32

SHAPES = {"tall": [128, 8], "wide": [8, 128], "square": [32, 32]}
LOW, HIGH = 0.5, 1.5
PLAIN = {**MUON, "lr": 0.0625, "weight_decay": 0.0}
RATE = 4.0  # factor on lr from step to step; more than the band is wide
# Second gradient as a multiple of the first, per singular direction. With momentum 0.95 the average has the sign of
# 1.95*x + 0.9025 with Nesterov, of x + 0.95 without, of x if nothing is carried on; with momentum 0.5 that of
# 0.75*x + 0.0125 (or 1.5*x + 0.25, if past gradients are summed up rather than averaged).
SECOND = [1.0, -0.3, -3.0, -0.6]

SIZES = [1.0, 2.0**-10, 2.0**-4]  # of the gradients in one stack
STACKED = 0.125  # room for products in bf16, which may round otherwise in a stack


def hadamard(n):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h / n**0.5


def directions(shape):
    """U (m, r) and V (n, r) with orthonormal columns of entries of one magnitude."""
    m, n = shape
    r = min(m, n)
    return hadamard(m)[:, :r], hadamard(n)[:, :r].roll(1, dims=1)


def spectrum(shape):
    return 2.0 ** -torch.linspace(0, 5, min(shape), dtype=torch.float64)


def group(kind, decay=0.0):
    return [{"name": kind, "shapes": [SHAPES[kind]], **PLAIN, "weight_decay": decay}]


def updates(rank, momenta, values, decays=(0.0, 0.0)):
    """Per shape, the change of one matrix in each step, of gradients U diag(values[step] * s) V' in turn.

    momenta: the group's momentum at each step; decays: its weight decay. The learning rate grows by RATE from step to
    step. Positive is downhill.
    """
    out = {}
    for kind, shape in SHAPES.items():
        named, optimizers = build(rank, group(kind, decays[0]))
        (p,) = named.values()
        u, v = directions(shape)
        changes = []
        for step, (momentum, factors) in enumerate(zip(momenta, values, strict=True)):
            s = spectrum(shape) if factors is None else torch.tensor(factors * (min(shape) // len(factors))).double()
            p.grad = (u @ s.diag() @ v.T).to(p)
            before = p.detach().clone()
            for optimizer in optimizers:
                for options in optimizer.param_groups:
                    if "momentum" not in options:
                        raise Unsupported("Muon's groups have no momentum to set")
                    if any(decays) and "weight_decay" not in options:
                        raise Unsupported("Muon's groups have no weight decay")
                    options["momentum"] = momentum
                    if "weight_decay" in options:
                        options["weight_decay"] = decays[step]
                    options["lr"] = PLAIN["lr"] * RATE**step
                optimizer.step()
            changes.append((before.double() - p.detach().double()).cpu())
        out[kind] = changes
    return out


def scaled(changes, kind, step):
    """The update with its length divided out."""
    m, n = SHAPES[kind]
    return changes[kind][step] / (PLAIN["lr"] * RATE**step * max(1, m / n) ** 0.5)


def along(changes, kind, step):
    """The update's part along each of the gradient's singular directions; positive is downhill."""
    u, v = directions(SHAPES[kind])
    return (u.T @ scaled(changes, kind, step) @ v).diag()


def judge(ranks, kind, condition, expected, actual, hint=""):
    if not condition:
        refute(ranks, group(kind), f"{kind}[0]", expected, f"{kind} matrix {SHAPES[kind]}, {actual}", hint)


@requirement("OPT-18", "Muon's update is orthogonal, of length lr * sqrt(max(1, m/n))")
def test_band(ranks, backend):
    """A length that is off by the shape trains some matrices several times faster than others."""
    changes = ranks.single(updates, [0.95, 0.95], [None, None], backend=backend, env=FLOAT32)
    for kind in SHAPES:
        for step in range(2):
            values = torch.linalg.svdvals(scaled(changes, kind, step))
            judge(
                ranks,
                kind,
                float(values.min()) >= LOW and float(values.max()) <= HIGH,
                f"singular values of update / (lr * sqrt(max(1, m/n))) within [{LOW}, {HIGH}]",
                f"step {step}: from {float(values.min()):.3g} to {float(values.max()):.3g}",
            )


@requirement("OPT-19", "Muon's update goes downhill along each singular direction of the gradient")
def test_direction(ranks, backend):
    """A transposed or flipped product has the right size and does not train."""
    changes = ranks.single(updates, [0.95, 0.95], [None, None], backend=backend, env=FLOAT32)
    for kind in SHAPES:
        parts = along(changes, kind, 0)
        judge(
            ranks,
            kind,
            float(parts.min()) >= LOW,
            f"a share of at least {LOW} of lr * sqrt(max(1, m/n)) downhill in each singular direction of the gradient",
            f"{float(parts.min()):.3g} to {float(parts.max()):.3g}",
        )


def check_signs(ranks, backend, momentum, wanted, hint):
    changes = ranks.single(updates, [0.95, momentum], [[1.0] * 4, SECOND], backend=backend, env=FLOAT32)
    for kind in SHAPES:
        parts = along(changes, kind, 1).reshape(-1, len(SECOND))
        for i, sign in wanted.items():
            got = float((parts[:, i] * sign).min()) * sign
            judge(
                ranks,
                kind,
                got * sign >= LOW,
                f"along a direction whose gradient was 1, then {SECOND[i]}, with momentum 0.95, then {momentum}: "
                f"{'downhill' if sign > 0 else 'uphill'} by at least {LOW} lr * sqrt(max(1, m/n))",
                f"{got:.3g}",
                hint=hint,
            )


@requirement("OPT-20", "Muon carries past gradients on by the momentum of the step")
def test_momentum(ranks, backend):
    """Momentum that is lost, or stuck at its first value, ignores the schedule and still trains."""
    check_signs(ranks, backend, 0.95, {0: 1, 1: 1, 2: -1}, "is the momentum buffer kept between steps?")
    check_signs(ranks, backend, 0.5, {0: 1, 1: -1, 2: -1, 3: -1}, "is the group's momentum read at every step?")


@requirement("OPT-21", "Muon looks ahead as Nesterov does", level="should")
def test_nesterov(ranks, backend):
    """Without it steps lag behind, and learning rates tuned for nanochat are too large."""
    check_signs(ranks, backend, 0.95, {3: -1}, "the update is the plain average of past gradients")


@requirement("OPT-23", "Muon's weight decay only shrinks, by at most lr * sqrt(max(1, m/n)) * weight_decay")
def test_decay(ranks, backend):
    """Decay of the wrong sign or size, or one that ignores its schedule, grows weights or holds them down for ever."""
    decay = MUON["weight_decay"]
    steps = [0.95, 0.95], [None, None]
    plain = ranks.single(updates, *steps, backend=backend, env=FLOAT32)
    decayed = ranks.single(updates, *steps, [decay, 0.0], backend=backend, env=FLOAT32)
    for kind, shape in SHAPES.items():
        p = start(shape, f"{kind}[0]").double()
        length = PLAIN["lr"] * max(1, shape[0] / shape[1]) ** 0.5
        check_decay(ranks, kind, plain[kind][0], decayed[kind][0], p, length * decay)
        extra = decayed[kind][1] - plain[kind][1]
        # Two results that are rounded each, and what they are subtracted from, both larger than the weights here.
        slack = 4 * 2.0**-24 * (p.abs() + plain[kind][0].abs() + plain[kind][1].abs() + length)
        judge(
            ranks,
            kind,
            bool((extra.abs() <= slack).all()),
            "no weight decays in a step whose weight_decay is 0, after one whose weight_decay was not",
            f"a weight moves by {float(extra.abs().max()):.3g}",
            hint="is the group's weight_decay read at every step?",
        )


def check_decay(ranks, kind, plain, decayed, p, share):
    """The change of `p` with decay against that without: towards zero, by `share` of it at most."""
    extra = (decayed - plain) * p.sign()
    most = share * p.abs()
    # Two results that are rounded each, and what is subtracted from either: 4 roundings of 2^-24.
    slack = 4 * 2.0**-24 * (p.abs() + plain.abs() + most)
    off = torch.maximum(-extra - slack, extra - most - slack)
    i = int(off.argmax())
    got, limit, at = (float(x.flatten()[i]) for x in (extra, most, p))
    judge(
        ranks,
        kind,
        float(off.max()) <= 0 and float(extra.sum()) > 0,
        "weight decay moves each weight towards zero by 0 to lr * sqrt(max(1, m/n)) * weight_decay of it",
        f"a weight of {at:.3g} moves by {got:.3g} towards zero, {limit:.3g} is the most"
        if float(off.max()) > 0
        else "no weight moves",
    )


def stack_updates(rank, together):
    """Per shape, the changes of matrices whose gradients differ in size by SIZES: of one group, or of a group each."""
    out = {}
    for kind, shape in SHAPES.items():
        each = [{**PLAIN, "name": f"{kind}{i}", "shapes": [shape]} for i in range(len(SIZES))]
        groups = [{**PLAIN, "name": kind, "shapes": [shape] * len(SIZES)}] if together else each
        named, optimizers = build(rank, groups)
        u, v = directions(shape)
        s = spectrum(shape) ** 0.2  # from 1 to 1/2: what products in bf16 round away is small beside all of it
        before = [p.detach().double() for p in named.values()]
        for p, size in zip(named.values(), SIZES, strict=True):
            p.grad = (u @ (s * size).diag() @ v.T).to(p)
        for optimizer in optimizers:
            optimizer.step()
        out[kind] = [(a - p.detach().double()).cpu() for a, p in zip(before, named.values(), strict=True)]
    return out


@requirement("OPT-24", "Muon's update of a matrix does not depend on the matrices it is stacked with")
def test_stacks(ranks, backend):
    """Ranks own shares of a stack: what is taken over a whole stack trains another model on every number of GPUs."""
    together, alone = (ranks.single(stack_updates, one, backend=backend, env=FLOAT32) for one in (True, False))
    for kind in SHAPES:
        for i, (got, want) in enumerate(zip(together[kind], alone[kind], strict=True)):
            off = float((got - want).norm() / want.norm())
            judge(
                ranks,
                kind,
                off <= STACKED,
                f"the update that a matrix gets alone, within {STACKED} of its length",
                f"number {i} of {len(SIZES)} in a stack, with gradients {SIZES[i]:.3g} times those of number 0, "
                f"is off by {off:.3g} of it",
                hint="is a norm, mean or rate taken over the stack instead of each of its matrices?",
            )
