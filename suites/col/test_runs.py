"""COL: the same bits on every rank and in every run, late ranks or not.

COL-15  the same parameters on every rank and in every run, on gradients whose sums round
COL-17  a rank that is late changes nothing (as it stands)
"""

from nanochat_gate import requirement, verify
from suites.col.watch import LATE, digests_after, late

STEPS = 2


@requirement("COL-15", "Parameters are the same bits on every rank and in every run", sizes=(3, 4), core=False)
def test_same_bits(ranks, size, backend):
    """Ranks that part by one bit part further with every step; a run that can't be repeated hides its faults."""
    runs = {
        "the first run": ranks(digests_after, STEPS, size=size, backend=backend, lane="withheld"),
        "the same ranks again": ranks(digests_after, STEPS, size=size, backend=backend, lane="withheld"),
        "new processes": ranks(digests_after, STEPS, size=size, backend=backend, lane="withheld", fresh=True),
    }
    first = runs["the first run"][0]
    for run, reports in runs.items():
        for rank, digests in enumerate(reports):
            for step, (want, got) in enumerate(zip(first, digests, strict=True)):
                names = [name for name in want if want[name] != got.get(name)]
                verify(
                    not names,
                    f"after step {step} the bits that rank 0 has in the first run, in all {len(want)} parameters",
                    f"{run}, rank {rank} of {size}: {len(names)} differ: {', '.join(names[:3])}",
                )


@requirement("COL-17", "A rank that is late changes nothing, as it stands", claim="cpu", sizes=(2, 3), core=False)
def test_late(ranks, size, backend):
    """A handle whose wait returns at once takes in memory that the late rank has not written yet."""
    for rank, differs in enumerate(ranks(late, [0, size - 1], size=size, backend=backend)):
        verify(
            not differs,
            f"the same parameters, bit for bit, when a rank is {LATE} s late",
            f"rank {rank} of {size}, {differs}",
            hint="a handle that this step waits on returns before its collective is through",
        )
