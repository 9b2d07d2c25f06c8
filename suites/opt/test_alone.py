"""OPT: one process without a process group against one with a group of its own.

OPT-22  both train alike, also where the target has a class for each
"""

from nanochat_gate import exact, requirement
from suites.opt import truth
from suites.opt.groups import model_parity
from suites.opt.judging import refute
from suites.steps import FLOAT32, gradient, make_model, set_schedule

STEPS = 3
SMALL = {"n_layer": 2}


def adamw_course(rank, steps, config):
    """The true course (see truth.py) of those parameters of the target's own model that AdamW updates."""
    model, optimizers = make_model(rank, config)
    names = {p: name for name, p in model.named_parameters()}
    # A parameter that init_weights leaves out is somebody else's fault, and NaN here.
    made = {
        names[p]: (group, truth.AdamW(p.detach(), group["betas"], group["eps"]))
        for optimizer in optimizers
        for group in optimizer.param_groups
        if "betas" in group
        for p in group["params"]
        if p.isfinite().all()
    }
    after = []
    for step in range(steps):
        set_schedule(optimizers, step)
        for name, (group, true) in made.items():
            dtype = str(true.dtype).removeprefix("torch.")
            true.step(gradient(true.p.shape, dtype, 0, 1, step, name), group["lr"], group["weight_decay"])
        after.append({name: (true.p.detach().clone(), true.bound.clone()) for name, (_, true) in made.items()})
    return after


@requirement("OPT-22", "One process trains alike with and without a process group", level="should")
def test_alone(ranks, backend):
    """torchrun with one process is how a run is tried before it gets more; it must be the run that was tried."""
    args = {"size": 1, "backend": backend, "env": FLOAT32}
    (plain,) = ranks(model_parity, STEPS, SMALL, group=None, torchrun=False, **args)
    (grouped,) = ranks(model_parity, STEPS, SMALL, lane="withheld", **args)
    course = ranks.single(adamw_course, STEPS, SMALL, backend=backend, env=FLOAT32)
    for step, true in enumerate(course):
        others = [{n: p for n, p in after[step].items() if n not in true} for after in (plain, grouped)]
        names = exact.differing(*others)
        if names:
            said = f"step {step}: {exact.summary(plain[step], grouped[step], names)}"
            refute(ranks, SMALL, names[0], "matrices bit-equal with and without a group", said)
        for name, (p, bound) in true.items():
            for said, after in (("without a group", plain), ("in a group of one", grouped)):
                ratio, distance, limit = truth.worst(after[step][name], p, bound)
                if not ratio <= 1:
                    expected = f"torch.optim.AdamW in fp64 within {limit:.3g}: {truth.FORMULA}, t = {step + 1}"
                    far = f"{said}, step {step}, {name}: off by {distance:.3g}, {ratio:.3g} times the bound"
                    refute(ranks, SMALL, name, expected, far)
