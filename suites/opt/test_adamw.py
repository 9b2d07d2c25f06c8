"""OPT: AdamW against torch.optim.AdamW in fp64, on one process and sharded, within the bound that truth.py derives.

OPT-16  with hyperparameters as nanochat's and torch's, lr and decay changed between steps
OPT-17  with an eps so large that it counts
"""

from nanochat_gate import requirement
from suites.opt.groups import ADAMW, group_parity
from suites.opt.judging import check_course
from suites.steps import FLOAT32

STEPS = 4
SHAPES = [[24, 5], [96, 32]]


def groups(*choices):
    """A group for each (lr, betas, eps, weight decay), of a small and a large parameter."""
    keys = ("lr", "betas", "eps", "weight_decay")
    return [
        {
            "name": "lr {}, betas {}, eps {}, decay {} ".format(*c),
            "shapes": SHAPES,
            **ADAMW,
            **dict(zip(keys, c, strict=True)),
        }
        for c in choices
    ]


USUAL = groups(
    (0.0625, [0.8, 0.96], 1e-10, 0.01),
    (0.25, [0.8, 0.995], 1e-10, 0.001),
    (0.5, [0.96, 0.95], 1e-10, 0.0),
    (0.001, [0.9, 0.999], 1e-8, 0.5),
    (0.25, [0.0, 0.9], 1e-10, 1.0),
)
LARGE_EPS = groups((0.125, [0.8, 0.96], 1e-2, 0.01), (0.125, [0.9, 0.995], 1e-1, 0.0), (0.01, [0.9, 0.999], 1e-4, 0.1))


def check(ranks, groups, size, backend, hint=""):
    if size == 1:
        worlds = [ranks.single(group_parity, STEPS, groups, backend=backend, env=FLOAT32)]
    else:
        worlds = ranks(group_parity, STEPS, groups, size=size, backend=backend, lane="withheld", env=FLOAT32)
    check_course(ranks, worlds, groups, STEPS, hint)


@requirement("OPT-16", "AdamW steps are those of torch.optim.AdamW, on one process and sharded", sizes=(1, 2, 3))
def test_usual(ranks, size, backend):
    """A slip in decay or bias correction still trains, to a worse loss that nobody can explain."""
    check(ranks, USUAL, size, backend)


@requirement("OPT-17", "A large eps counts in AdamW as in torch.optim.AdamW", level="should", sizes=(1, 2))
def test_large_eps(ranks, size, backend):
    """Who raises eps to steady a run gets another eps in the first hundreds of steps. nanochat's own is 1e-10."""
    hint = "eps is added to sqrt(v) before the bias correction, so it counts as eps/sqrt(1-beta2^t)"
    check(ranks, LARGE_EPS, size, backend, hint=hint)
