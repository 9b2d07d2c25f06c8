"""OPT: the sharded optimizer against single-process training, on the target's own model and setup."""

from nanochat_gate import exact, requirement, verify
from suites.steps import model_steps

STEPS = 5



def check(ranks, size, backend, lane):
    single = ranks.single(model_steps, STEPS)
    for rank, after in enumerate(ranks(model_steps, STEPS, size=size, backend=backend, lane=lane)):
        for step, (want, got) in enumerate(zip(single, after, strict=True)):
            names = exact.differing(want, got)
            verify(
                not names,
                f"every parameter after step {step} bit-equal to single-process training",
                f"rank {rank} of {size}, step {step}: {exact.summary(want, got, names)}",
            )


@requirement("OPT-01", "Sharded steps as they stand equal single-process steps bit for bit", claim="cpu", sizes=(2, 3, 4))
def test_as_it_stands(ranks, size, backend):
    """A step that averages, slices or gathers wrongly trains another model than one process would."""
    check(ranks, size, backend, "plain")


@requirement("OPT-02", "Sharded steps equal single-process steps bit for bit, results withheld", sizes=(2, 3, 4))
def test_withheld(ranks, size, backend):
    """A result used before its wait is right on a quiet machine and wrong on a busy one."""
    check(ranks, size, backend, "withheld")
