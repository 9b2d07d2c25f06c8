"""TRN: the target's own training script on the bundled corpus, in ranks that watch it.

TRN-10  no rank trains alone: their data differs, and after every step their parameters agree in every bit
TRN-11  the step line's tokens per second are those of the tokens trained on and of our clock (should)
TRN-12  as it stands, with nothing provided, the same holds (CPU)
"""

import re

from nanochat_gate import Unsupported, requirement, verify
from suites import whole

STEPS = 4


def run(ranks, size, as_it_stands=False):
    """What each rank of one run of the script reported; one run serves several requirements."""
    name = f"trn-script-{size}-{'own' if as_it_stands else 'given'}"
    return ranks.gate.shared(
        name, lambda: whole.train(ranks, size, as_it_stands=as_it_stands, steps=STEPS, save_every=2)[0]
    )


def verify_together(said, size):
    """Every rank finishes, and a step takes in what all ranks computed."""
    for rank, of_rank in enumerate(said):
        told = f"rank {rank} of {size}"
        tail = " ".join(of_rank["printed"].split())[-150:]
        verify(of_rank["code"] == 0, f"{told} ends with code 0", f"code {of_rank['code']}: {tail}")
        verify(len(of_rank["steps"]) >= STEPS, f"{told} takes {STEPS} steps", f"it takes {len(of_rank['steps'])}")
    for number, of_ranks in enumerate(zip(*(of_rank["steps"] for of_rank in said), strict=True)):
        parameters = {step["parameters"] for step in of_ranks}
        expected = f"after step call {number} all ranks hold the same bits"
        verify(len(parameters) == 1, expected, f"{len(parameters)} models among {size} ranks: they train apart")
    finals = {tuple(sorted(of_rank["final"].items())) for of_rank in said}
    verify(len(finals) == 1, "at the end all ranks hold the same bits", f"{len(finals)} models among {size} ranks")
    batches = [set(of_rank["batches"]) for of_rank in said]
    for rank, mine in enumerate(batches):
        for other, theirs in enumerate(batches[:rank]):
            verify(not mine & theirs, "no batch on two ranks", f"ranks {other} and {rank} share {len(mine & theirs)}")


@requirement("TRN-10", "The training script trains one model on all ranks' data", sizes=(2,))
def test_together(ranks, size):
    """Ranks that each train alone print twice the throughput, and the checkpoint is of one of them."""
    verify_together(run(ranks, size), size)


@requirement(
    "TRN-12", "As it stands on CPU, the training script trains one model on all ranks' data", claim="cpu", sizes=(2,)
)
def test_together_as_it_stands(ranks, size):
    """What a fork's own start-up lacks, nobody provides in a real run."""
    own = ranks.facts.group == "target" and ranks.facts.step == "ok"
    verify_together(run(ranks, size, as_it_stands=not own), size)


@requirement("TRN-11", "Tokens per second are those of the tokens trained on", level="should", sizes=(2,))
def test_throughput(ranks, size):
    """A rate that counts each rank's tokens N times, or counts none but its own, is what ports are judged by."""
    said = run(ranks, size)
    tokens = sum(of_rank["tokens"] for of_rank in said)
    batch = whole.ROWS * whole.SEQUENCE * size
    expected = f"{STEPS} steps of {batch} tokens over {size} ranks"
    verify(tokens == STEPS * batch, expected, f"targets of {tokens} tokens went through the model")
    lines = re.findall(r"dt: ([\d.]+)ms.*?tok/sec: ([\d,]+)", said[0]["printed"])
    if not lines:
        raise Unsupported("the script prints no dt and tok/sec")
    for number, (dt, rate) in enumerate(lines):
        want, got = batch / (float(dt) / 1000), int(rate.replace(",", ""))
        # dt is printed to a hundredth of a millisecond, the rate as a whole number.
        slack = 2 + want * 0.01 / float(dt)
        told = f"{got} tok/sec beside dt: {dt}ms"
        verify(abs(got - want) <= slack, f"step {number} prints {batch} tokens over dt, {want:.0f} tok/sec", told)
