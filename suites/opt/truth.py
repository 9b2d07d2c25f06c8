"""AdamW in fp64, by torch.optim.AdamW, and how far rounding may take a right implementation away from it.

The running error bound, per element, with u the unit roundoff of the parameter's dtype (2^-24 for fp32, 2^-9 for bf16,
which holds whether a target computes in that dtype or computes in fp32 and stores in it) and w = 2^-24, since 1 - beta
and beta^t may be computed in fp32, to a relative w/(1-beta):

    m, t steps of a lerp (4 roundings) of g          t*4u +   w/(1-beta1)     relative to M, the mean of |g|:
    v, likewise, of g*g (5)                          t*5u +   w/(1-beta2)     m may cancel, M does not
    1 - beta^t, twice                                        3w/(1-beta) + u  each; that of v under the root
    root, + eps, division, lr/bias1, lr, product     6u
    update, the sum                                  (7t + 8)u + 4w/(1-beta1) + 2w/(1-beta2) =: A
    parameter: decay factor, product, sum            3u|p| a step, which decay never enlarges

So after step t the error is at most the sum over steps of 3u|p| + lr * A/(1-A) * (M/bias1) / (sqrt(v/bias2) + eps).
"""

import torch

from suites.opt.groups import start
from suites.steps import SCHEDULE, gradient

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}
FORMULA = "(7t+8)u + 2^-24*(4/(1-beta1) + 2/(1-beta2)) of the update and 3u of the parameter a step"


class AdamW:
    """One parameter's true course: `p` after `steps` steps, and `bound` on a right target's distance from it."""

    def __init__(self, start, betas, eps):
        self.dtype, self.unit = start.dtype, UNIT[start.dtype]
        self.p = torch.nn.Parameter(start.double())
        self.betas, self.eps = tuple(betas), eps
        self.optimizer = torch.optim.AdamW([self.p], betas=self.betas, eps=eps, foreach=False, fused=False)
        self.mean = torch.zeros_like(self.p)
        self.bound = torch.zeros_like(self.p)
        self.steps = 0

    @torch.no_grad()
    def step(self, gradient, lr, weight_decay):
        self.p.grad = gradient.double()
        self.optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        before = self.p.abs().clone()
        self.optimizer.step()
        self.steps += 1
        t, (beta1, beta2), u, w = self.steps, self.betas, self.unit, UNIT[torch.float32]
        self.mean.lerp_(self.p.grad.abs(), 1 - beta1)
        second = self.optimizer.state[self.p]["exp_avg_sq"]
        size = (self.mean / (1 - beta1**t)) / ((second / (1 - beta2**t)).sqrt() + self.eps)
        relative = (7 * t + 8) * u + w * (4 / (1 - beta1) + 2 / (1 - beta2))
        self.bound += 3 * u * torch.maximum(before, self.p.abs())
        self.bound += lr * relative / (1 - relative) * size.nan_to_num()


def course(rank, groups, steps):
    """The true course of hand-built AdamW groups under the schedule: per step {name: (p, bound)}. Runs no target code.

    In a rank, since making a torch optimizer imports torch._dynamo, which is there already and would cost pytest 2 s.
    """
    made = {}
    for group in groups:
        dtype = getattr(torch, group.get("dtype", "float32"))
        for i, shape in enumerate(group["shapes"]):
            name = f"{group['name']}[{i}]"
            made[name] = group, AdamW(start(shape, name).to(dtype), group["betas"], group["eps"])
    after = []
    for step in range(steps):
        lr_factor, _, decay_factor = SCHEDULE[step]
        for name, (group, true) in made.items():
            whole = gradient(true.p.shape, group.get("dtype", "float32"), 0, 1, step, name)
            true.step(whole, group["lr"] * lr_factor, group["weight_decay"] * decay_factor)
        after.append({name: (true.p.detach().clone(), true.bound.clone()) for name, (_, true) in made.items()})
    return after


def worst(got, true, bound):
    """(distance / bound, distance, bound) where that is largest; NaN in `got` counts as infinitely far."""
    distance = (got.double() - true).abs().nan_to_num(nan=float("inf"))
    ratio = distance / bound.clamp_min(torch.finfo(torch.float64).tiny)
    i = int(ratio.argmax())
    return tuple(float(x.flatten()[i]) for x in (ratio, distance, bound))
