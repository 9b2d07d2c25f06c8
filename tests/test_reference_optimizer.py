"""The reference's optimizer against an fp64 evaluation of the formula it was written from, over several steps.

The formula is evaluated here in fp64, and again in fp32. The reference, a third evaluation whose sums run in another
order, may be as far from the truth as the fp32 one is, and as one rounding of the result is where that came out lucky;
FACTOR allows for what one order of sums is to another.
"""

import json

import pytest
import torch

from nanochat_gate import environment, target, world
from suites.opt.groups import ADAMW, MUON, build
from suites.steps import FLOAT32, set_schedule

STEPS = 5
FACTOR = 8
GROUPS = [
    {"name": "tall", "shapes": [[24, 8]] * 5, **MUON},
    {"name": "wide", "shapes": [[8, 24]] * 2, **MUON, "beta2": 0.95},
    {"name": "square", "shapes": [[12, 12]] * 3, **MUON, "lr": 0.02, "weight_decay": 0.1},
    {"name": "one", "shapes": [[16, 4]], **MUON, "ns_steps": 3},
    {"name": "vector", "shapes": [[7], [48, 32]], **ADAMW},
]
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def gradient(shape, name, rank, step):
    seed = sum(ord(c) * 31**i for i, c in enumerate(f"{name} {rank} {step}")) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4.0 ** (step % 3 - 1)


def reference_steps(rank):
    """Every parameter after each step on gradients of each rank's own, and the options of each step."""
    named, optimizers = build(rank, GROUPS)
    groups = {id(p): group for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    out = [{name: (p.detach().clone(), {}) for name, p in named.items()}]
    for step in range(STEPS):
        set_schedule(optimizers, step)
        for name, p in named.items():
            p.grad = gradient(p.shape, name, rank.rank, step)
        for optimizer in optimizers:
            optimizer.step()
        keep = ("lr", "momentum", "weight_decay", "betas", "eps", "beta2", "ns_steps", "kind")
        options = {name: {k: v for k, v in groups[id(p)].items() if k in keep} for name, p in named.items()}
        out.append({name: (p.detach().clone(), options[name]) for name, p in named.items()})
    return out


class Muon:
    """One matrix's course in the dtype of `p`."""

    def __init__(self, p):
        self.p, self.momentum = p, torch.zeros_like(p)
        rows, columns = p.shape
        self.over = 1 if rows >= columns else 0  # the dim that the second moment is a mean over
        self.second = torch.zeros_like(p.mean(self.over, keepdim=True))

    def step(self, g, lr, momentum, weight_decay, beta2, ns_steps, **_):
        m, n = self.p.shape
        self.momentum = momentum * self.momentum + (1 - momentum) * g
        x = (1 - momentum) * g + momentum * self.momentum
        x = x * (x.norm() / m**0.5 / x.norm(dim=1, keepdim=True).clamp_min(1e-6))
        x = x / (1.01 * x.norm() + 1e-6)
        for a, b, c in POLAR_EXPRESS[:ns_steps]:
            # The two ways to put it, with XtX for tall and XXt for wide, are the same in exact arithmetic.
            xxt = x @ x.T
            x = a * x + b * xxt @ x + c * xxt @ xxt @ x
        x = x * (min(m, n) ** 0.5 / x.norm())
        v = x.square().mean(self.over, keepdim=True)
        self.second = beta2 * self.second + (1 - beta2) * v
        scaled = x / self.second.clamp_min(1e-10).sqrt()
        x = scaled * (x.norm() / scaled.norm())
        rate = lr * max(1.0, m / n) ** 0.5
        self.p = self.p - rate * x - rate * weight_decay * self.p * (x * self.p >= 0)


class AdamW:
    """One parameter's course in the dtype of `p`."""

    def __init__(self, p):
        self.p, self.m, self.v, self.t = p, torch.zeros_like(p), torch.zeros_like(p), 0

    def step(self, g, lr, betas, eps, weight_decay, **_):
        self.t += 1
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        root = (self.v / (1 - betas[1] ** self.t)).sqrt()
        self.p = self.p * (1 - lr * weight_decay) - lr * self.m / (1 - betas[0] ** self.t) / (root + eps)


def course(got, name, size, dtype):
    """Where the formula takes a parameter, after each step."""
    start, _ = got[0][name]
    kind = Muon if got[1][name][1]["kind"] == "muon" else AdamW
    true = kind(start.to(dtype))
    after = []
    for step in range(STEPS):
        mean = sum(gradient(start.shape, name, rank, step).to(dtype) for rank in range(size)) / size
        true.step(mean, **got[step + 1][name][1])
        after.append(true.p)
    return after


def check(worlds):
    for got in worlds:
        for name in got[0]:
            exact, rough = (course(got, name, len(worlds), dtype) for dtype in (torch.float64, torch.float32))
            for step in range(STEPS):
                p = got[step + 1][name][0].double()
                distance = (p - exact[step]).abs().max()
                usual = (rough[step].double() - exact[step]).abs().max() + 2.0**-24 * exact[step].abs().max()
                assert distance <= FACTOR * usual, f"{name} after step {step}: off by {distance:.3g}, usual {usual:.3g}"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_formula(ranks, size):
    """Both sharded and single steps could agree with each other on something that is not nanochat's optimizer."""
    check(ranks(reference_steps, size=size, env=FLOAT32))


@pytest.mark.parametrize(
    ("inside", "find", "put"),
    [
        pytest.param("_muon_step", "(g * params) >= 0", "(g * params) < 0", id="decay-where-it-disagrees"),
        pytest.param(
            "_muon_step", "grads.lerp(momentum_buffer, momentum)", "momentum_buffer.clone()", id="no-nesterov"
        ),
        pytest.param("_muon_step", "row_norms.clamp_min(1e-6)", "mean_norm.clamp_min(1e-6)", id="rows-not-rescaled"),
        pytest.param(
            "_muon_step", "min(m, n) ** 0.5 / g.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6)", "1.0", id="norm"
        ),
        pytest.param("_muon_step", "1 - beta2_t.to(second_buffer.dtype)", "0.1", id="beta2-of-the-group-ignored"),
        pytest.param("MuonAdamW._muon", "-1 if m >= n else -2", "-2 if m >= n else -1", id="variance-along-other-dim"),
        pytest.param("MuonAdamW._muon", "-1 if m >= n else -2", "-1 if m > n else -2", id="variance-of-square"),
        pytest.param(
            "_muon_step", "polar_express_coeffs[:ns_steps]", "polar_express_coeffs[:4]", id="ns-steps-ignored"
        ),
        pytest.param("_muon_step", "second_buffer.clamp_min(1e-10)", "v.to(g.dtype)", id="second-moment-forgotten"),
    ],
)
def test_formula_tells(gate, tmp_path, inside, find, put):
    """A bound that lets these through would let the reference drift from nanochat."""
    from tests.faults import edit  # here, since ranks read this file too and know no package of tests

    tree = edit.make_copy(tmp_path / "tree")
    edit.apply([edit.Edit("nanochat/optim.py", inside, find, put)], tree)
    spec = world.Spec(json.dumps(target.find(tree).for_ranks()), 2, env=tuple(FLOAT32.items()))
    ranks = world.World(gate.server, spec, environment.base())
    try:
        replies = ranks.call(__file__, "reference_steps", [], "reference_steps")
    finally:
        ranks.close()
    assert all(reply.ok for reply in replies), replies
    with pytest.raises(AssertionError, match="after step"):
        check([reply.value for reply in replies])
