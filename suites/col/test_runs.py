"""COL: the same collectives and the same bits in every process and every run, on gradients whose sums round.

COL-15  the same parameters on every rank and in every run
COL-16  the same collectives in real torchrun, where each rank orders its sets otherwise
COL-17  a rank that is late changes nothing (as it stands)
"""

from nanochat_gate import NotTested, requirement, verify
from suites.col.test_waits import require_seen, verify_order
from suites.col.watch import late, traced

STEPS = 2


@requirement("COL-15", "Parameters are the same bits on every rank and in every run", sizes=(2, 3, 4), core=False)
def test_same_bits(ranks, size, backend):
    """Ranks that part by one bit part further with every step; runs that do cannot be repeated to find a fault."""
    runs = [
        ("the first run", ranks(traced, STEPS, size=size, backend=backend, lane="withheld")),
        ("the same ranks again", ranks(traced, STEPS, size=size, backend=backend, lane="withheld")),
        ("new processes", ranks(traced, STEPS, size=size, backend=backend, lane="withheld", fresh=True)),
    ]
    verify_bits(runs, runs[0][1][0]["digests"], size)


def verify_bits(runs, first, size):
    """Digests of all ranks of all runs against those of rank 0 of the first run."""
    for run, reports in runs:
        for rank, report in enumerate(reports):
            for step, (want, got) in enumerate(zip(first, report["digests"], strict=True)):
                names = [name for name in want if want[name] != got.get(name)]
                verify(
                    not names,
                    f"after step {step} the bits that rank 0 has in the first run, in all {len(want)} parameters",
                    f"{run}, rank {rank} of {size}: {len(names)} differ: {', '.join(names[:3])}",
                )


@requirement(
    "COL-16", "Real torchrun: the same collectives on every rank, the same bits as ever", sizes=(3,), core=False
)
def test_torchrun(ranks, size):
    """Collectives in the order of a set pair up among forks of one process, and not among torchrun's ranks."""
    launched = ranks.torchrun(traced, STEPS, size=size, lane="withheld")
    require_seen(launched, launched[0]["events"], size)
    if len({report["hash"] for report in launched}) < size:
        raise NotTested("the ranks share a PYTHONHASHSEED, which hides what depends on the order of a set")
    verify_order([report["events"] for report in launched])
    forked = ranks(traced, STEPS, size=size, lane="withheld")
    verify_bits([("under torchrun", launched)], forked[0]["digests"], size)


@requirement("COL-17", "A rank that is late changes nothing, as it stands", claim="cpu", sizes=(2, 3), core=False)
def test_late(ranks, size, backend):
    """A handle whose wait returns at once takes in memory that the late rank has not written yet."""
    for rank, differs in enumerate(ranks(late, [0, size - 1], size=size, backend=backend)):
        verify(
            not differs,
            "the same parameters, bit for bit, when a rank is half a second late",
            f"rank {rank} of {size}, {differs}",
            hint="the handle this step waits on returns before the collective is through",
        )
