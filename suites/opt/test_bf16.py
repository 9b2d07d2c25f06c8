"""OPT: parameters in bf16, as nanochat stores its embeddings on GPUs.

OPT-09  AdamW: sharded equals one process bit for bit
OPT-10  AdamW: within derived roundings of bf16 of the true course
OPT-11  Muon: sharded equals one process bit for bit (nanochat keeps its matrices in fp32)
OPT-25  AdamW: its bias correction goes on past 256 steps, the last number that bf16 can count to
"""

from nanochat_gate import Unsupported, requirement
from suites.opt.groups import ADAMW, MUON, build, group_parity
from suites.opt.judging import check_course, check_parity, refute
from suites.steps import FLOAT32

# Under and over 1024 elements; slices at 2 and 3 ranks are multiples of 32, the widest vector of bf16.
SHAPES = [[12, 64], [12, 96], [96, 32]]
VECTORS = [
    {
        "name": "wte",
        "shapes": SHAPES,
        "dtype": "bfloat16",
        **ADAMW,
        "lr": 0.5,
        "betas": [0.8, 0.995],
        "weight_decay": 0.01,
    },
    {"name": "fast", "shapes": SHAPES, "dtype": "bfloat16", **ADAMW, "lr": 0.5, "betas": [0.9, 0.9]},
]
MATRICES = [
    {"name": f"{K} of {shape}", "shapes": [shape] * K, "dtype": "bfloat16", **MUON}
    for K in (1, 5)
    for shape in ([32, 8], [8, 32])
]


@requirement("OPT-09", "AdamW steps of bf16 parameters equal one process's bit for bit", sizes=(2, 3))
def test_adamw_bits(ranks, size, backend):
    """Averages that take a detour through another dtype make a model depend on the number of GPUs."""
    check_parity(ranks, group_parity, 3, VECTORS, size=size, backend=backend)


@requirement("OPT-10", "AdamW steps of bf16 parameters lose no more than their own roundings", sizes=(2,))
def test_adamw_rounding(ranks, size, backend):
    """1 - beta2 = 0.005 taken in bf16 is off by a fifth, and embeddings learn at another rate than was set."""
    worlds = ranks(group_parity, 2, VECTORS, size=size, backend=backend, lane="withheld", env=FLOAT32)
    check_course(ranks, worlds, VECTORS, 2)


@requirement("OPT-11", "Muon steps of bf16 matrices equal one process's bit for bit", level="should", sizes=(2, 3))
def test_muon_bits(ranks, size, backend):
    """A fork that keeps its matrices in bf16 to save memory trains another model on every number of GPUs."""
    check_parity(ranks, group_parity, 3, MATRICES, size=size, backend=backend)


COUNTED = [{"name": "counted", "shapes": [[8, 8]], "dtype": "bfloat16", **ADAMW, "weight_decay": 0.0}]
BETAS, LATE = (0.8, 0.995), 512


def count_on(rank):
    """How far one weight moves in steps 2 and LATE, as shares of lr, of gradients that are 1 throughout.

    Betas of 0 make both averages 1 in the first step; they stay that, in any dtype. What is left of a step is its bias
    correction, and with lr = 0 in all other steps the weight stays where it is.
    """
    named, optimizers = build(rank, COUNTED)
    (p,) = named.values()
    p.data.zero_()
    moved = {}
    for step in range(1, LATE + 1):
        before = p.detach().clone()
        p.grad = p.new_ones(p.shape)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["betas"] = BETAS if step > 1 else (0.0, 0.0)
                group["lr"] = ADAMW["lr"] if step in (2, LATE) else 0.0
            optimizer.step()
        moved[step] = float((before - p.detach()).float().mean()) / ADAMW["lr"]
        p.data.zero_()
    return [moved[2], moved[LATE]]


def corrected(step):
    """What bias correction makes of averages that are 1: sqrt(1 - beta2^t) / (1 - beta1^t) (arXiv 1412.6980)."""
    return (1 - BETAS[1] ** step) ** 0.5 / (1 - BETAS[0] ** step)


@requirement("OPT-25", "AdamW's bias correction of bf16 parameters goes on past 256 steps")
def test_count(ranks, backend):
    """A step count in bf16 stays at 256 for ever; embeddings then learn a sixth slower than they are told to."""
    early, late = ranks.single(count_on, backend=backend, env=FLOAT32)
    room = 2.0**-7  # the weight is rounded to bf16, and so may the rates be
    if not abs(early - corrected(2)) <= room * corrected(2):
        raise Unsupported("AdamW's betas cannot be changed from step to step")
    off = abs(late / corrected(LATE) - 1)
    if not off <= room:
        said = f"it moves {late:.4g} lr, off by {off:.2g}; a count of 256 gives {corrected(256):.4g}"
        refute(ranks, COUNTED, "counted[0]", f"a weight moves {corrected(LATE):.4g} lr in step {LATE}", said)
