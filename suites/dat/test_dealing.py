"""DAT: which documents each rank reads, over epochs and after a resume.

DAT-01  row groups are dealt without overlap or loss, in whatever order a file system lists the shards
DAT-02  the loader goes on past the first epoch
DAT-03  the same batches every time, at any speed of the ranks
DAT-07  the validation split is disjoint from training
DAT-09  a resumed loader repeats nothing and skips no more than the documents it held
"""

import torch

from nanochat_gate import Unsupported, requirement, verify
from suites.dat import corpus
from suites.dat.reader import LENGTH, ROWS, readings

SHARDS = corpus.layout(corpus.PLAIN)
TRAIN = [number for shard in SHARDS[:-1] for group in shard for number in group]
TOKENS = sum(1 + corpus.length(number) for number in TRAIN)
PLACE = {number: (s, g) for s, shard in enumerate(SHARDS) for g, group in enumerate(shard) for number in group}


def plain(ranks, size):
    """What each rank of `size` read of the plain corpus; one run serves all of DAT's requirements on it."""
    base = corpus.make(ranks, "plain", corpus.PLAIN)
    batches = TOKENS // (ROWS * LENGTH * size)

    def run():
        alone = size == 1 and not ranks.facts.alone
        return ranks(
            readings, base, batches, size=size, group=None if alone else "target", torchrun=not alone, fresh=True
        )

    return ranks.gate.shared(f"dat-plain-{size}", run)


def documents(batches):
    """Numbers of the documents that have a token in these batches."""
    return {int(n) for n in torch.unique(batches[batches >= corpus.FIRST].sub(corpus.FIRST) // corpus.STRIDE)}


def first_epoch(log):
    """The documents read before any comes again, in order."""
    seen = {}
    for number in log:
        if number in seen:
            break
        seen[number] = None
    return list(seen)


def some(numbers):
    return ", ".join(map(str, sorted(numbers)[:5])) + (", ..." if len(numbers) > 5 else "")


@requirement("DAT-01", "An epoch gives every document to exactly one rank", sizes=(1, 2, 3, 4))
def test_dealt(ranks, size):
    """Overlap is data trained on twice under the name of a bigger batch; a loss is data paid for and never seen."""
    said = plain(ranks, size)
    epochs = [set(first_epoch(of_rank["whole"]["log"])) for of_rank in said]
    given = [documents(of_rank["whole"]["x"]) for of_rank in said]
    expected = f"each of {len(TRAIN)} training documents goes to one of {size} ranks"
    for rank, mine in enumerate(given):
        for other, theirs in enumerate(given[:rank]):
            both = mine & theirs
            verify(not both, expected, f"ranks {other} and {rank} are both given {len(both)}: {some(both)}")
    ended = [of_rank["whole"]["ended"] for of_rank in said]
    lost = set(TRAIN) - set().union(*epochs)
    verify(not lost or any(ended), expected, f"{len(lost)} are read by no rank in an epoch: {some(lost)}")
    lost = set(TRAIN) - set().union(*given)
    few = len(lost) < len(TRAIN) / 4  # best fit leaves single texts in its buffer, and crops others to their BOS
    verify(few or any(ended), expected, f"{len(lost)} are read and come in no batch: {some(lost)}")
    strange = set().union(*given) - set(TRAIN)
    verify(not strange, expected, f"{len(strange)} documents of the validation shard are given out: {some(strange)}")


@requirement("DAT-02", "The loader goes on past the first epoch, with the same documents", sizes=(1, 2))
def test_epochs(ranks, size):
    """A run longer than its data hangs or ends in the middle, hours in."""
    for rank, of_rank in enumerate(plain(ranks, size)):
        whole = of_rank["whole"]
        had = f"rank {rank} of {size}, after {len(whole['x'])} batches and {len(set(whole['log']))} documents,"
        verify(not whole["ended"], "batches for ever, epoch after epoch", f"{had} {whole['ended']}")
        epoch = first_epoch(whole["log"])
        second = whole["log"][len(epoch) : 2 * len(epoch)]
        expected = f"the second epoch of rank {rank} has the documents of the first"
        verify(set(second) == set(epoch), expected, f"it has {len(set(second) & set(epoch))} of {len(epoch)}")
        epochs = [state["epoch"] for state in whole["states"] if state and "epoch" in state]
        expected = "the state counts epochs upwards"
        verify(not epochs or (epochs == sorted(epochs) and epochs[-1] > epochs[0]), expected, f"it says {epochs[-5:]}")


@requirement("DAT-03", "The loader gives the same batches every time, at any speed of the ranks", sizes=(2, 3))
def test_deterministic(ranks, size):
    """A run that cannot be repeated cannot be debugged, and ranks that race for data train on chance."""
    for rank, of_rank in enumerate(plain(ranks, size)):
        first, again = of_rank["whole"]["x"], of_rank["again"]["x"]
        for number, (one, other) in enumerate(zip(first, again, strict=False)):
            expected = f"batch {number} of rank {rank} is the same when it is read again"
            verify(torch.equal(one, other), expected, f"it differs at {int((one != other).sum())} of {one.numel()}")
        short = f"{len(again)} batches come: {of_rank['again']['ended']}"
        verify(len(again) == min(20, len(first)), f"rank {rank} is given 20 batches again", short)


@requirement("DAT-07", "The validation split has no document of the training split", sizes=(2,))
def test_validation(ranks, size):
    """Validation on training data reports a model that learns by heart as one that learns."""
    for rank, of_rank in enumerate(plain(ranks, size)):
        given = documents(of_rank["val"]["x"])
        verify(bool(given), f"rank {rank} is given validation batches", of_rank["val"]["ended"] or "there are none")
        both = given & set(TRAIN)
        verify(not both, "validation batches of the last shard alone", f"{len(both)} training documents: {some(both)}")


def next_group(number, rank, size):
    """The documents of the row group that `rank` reads after the one of `number`."""
    shard, group = PLACE[number]
    group += size
    while group >= len(SHARDS[shard]):
        shard, group = shard + 1, rank
    return SHARDS[shard][group]


@requirement(
    "DAT-09", "A resumed loader repeats no document and goes on at the next row group at last", sizes=(1, 2, 3)
)
def test_resume(ranks, size):
    """A resumed run that starts over overfits the head of the data; one that leaps ahead never sees the rest."""
    said = plain(ranks, size)
    if not any(of_rank["resumed"] for of_rank in said):
        raise Unsupported("the loader tells no position to resume from")
    for rank, of_rank in enumerate(said):
        whole = of_rank["whole"]
        for after, resumed in of_rank["resumed"].items():
            told = f"rank {rank} of {size} resumed after batch {after} ({whole['states'][int(after) - 1]})"
            verify(not resumed["ended"], f"{told} is given batches", resumed["ended"])
            before = documents(whole["x"][: int(after)])
            both = documents(resumed["x"]) & before
            verify(not both, f"{told} repeats nothing of this epoch", f"{len(both)} documents again: {some(both)}")
            last = whole["log"][whole["read"][int(after) - 1] - 1]
            coming = set(next_group(last, rank, size)) - before
            skipped = coming - set(resumed["log"]) - documents(resumed["x"])
            expected = f"{told} goes on at its next row group at last, with documents {some(coming)}"
            verify(not skipped, expected, f"{len(skipped)} of them do not come: {some(skipped)}")
            epochs = [s[-1].get("epoch", 1) for s in (whole["states"][: int(after)], resumed["states"])]
            verify(epochs[0] <= epochs[1], f"{told} counts its epochs on", f"it says epoch {epochs[1]}")
