"""CKP: going on from a checkpoint.

CKP-01  bitwise what an uninterrupted run gives, on every rank: weights, optimizer shards, schedule
CKP-04  ranks that save at once into a folder that is not there yet all save
CKP-11  a checkpoint of another world size is refused with both numbers (should)
"""

import torch

from nanochat_gate import requirement, verify
from suites.ckp.saved import loaded_by, race, resumed, saved_by
from suites.steps import FLOAT32


def folder(ranks, name):
    """A folder of this test's own."""
    place = ranks.gate.folder / f"ckp-{name}-{ranks.gate.worker}"
    place.mkdir(exist_ok=True)
    return str(place)


@requirement("CKP-01", "A resumed run is bitwise the run that was not stopped", sizes=(1, 2, 3, 4))
def test_resume(ranks, size):
    """A shard that is lost, swapped or half restored bends the loss at every resume, a little."""
    group = None if size == 1 and not ranks.facts.alone else "target"
    place = folder(ranks, f"resume-{size}")
    said = ranks(resumed, place, size=size, group=group, torchrun=bool(group), lane="withheld", env=FLOAT32, fresh=True)
    for rank, of_rank in enumerate(said):
        saved, loaded = of_rank["schedule"]
        expected = f"rank {rank} finds lr, momentum and weight decay of every group as they were saved"
        differ = [f"group {i}: {b}, saved {a}" for i, (a, b) in enumerate(zip(saved, loaded, strict=False)) if a != b]
        verify(not differ and len(saved) == len(loaded), expected, "; ".join(differ[:2]) or f"{len(loaded)} groups")
        names = [name for name, bits in of_rank["on"].items() if of_rank["again"].get(name) != bits]
        verify(
            not names,
            "with the same gradients the parameters are bit-equal three steps after the checkpoint",
            f"rank {rank} of {size}: {len(names)} of {len(of_rank['on'])} differ: {', '.join(names[:3])}",
        )


@requirement("CKP-04", "Ranks that save at once into a folder that is not there yet all save", sizes=(2,))
def test_race(ranks, size):
    """The first checkpoint of a run, hours in, ends it because two ranks made the same folder, or none did."""
    for rank, tensor in enumerate(ranks(race, folder(ranks, "race"), size=size, fresh=True)):
        own = torch.full((3,), float(rank))
        verify(torch.equal(tensor, own), f"rank {rank} loads the shard it saved", f"it loads {tensor.tolist()}")


@requirement("CKP-11", "A checkpoint of another world size is refused with both numbers", level="should", sizes=(1, 3))
def test_other_size(ranks, size):
    """Shards that do not fit are loaded in silence, or fail steps later with the shapes of something else."""
    place = folder(ranks, f"other-{size}")
    ranks(saved_by, place, size=2, lane="withheld", env=FLOAT32, fresh=True)
    group = None if size == 1 and not ranks.facts.alone else "target"
    said = ranks(loaded_by, place, size=size, group=group, torchrun=bool(group), env=FLOAT32, fresh=True)
    for rank, error in enumerate(said):
        expected = f"rank {rank} of {size} refuses what 2 ranks saved, naming 2 and {size}"
        told = error.replace(".pt", "").replace("_", " ")
        verify("2" in told and str(size) in told, expected, error or "it loads it without a word")
