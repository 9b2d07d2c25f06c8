"""DAT: what is in a batch.

DAT-04  targets are inputs shifted by one, at every position
DAT-05  every row starts with BOS, where the loader packs by row
DAT-06  shape, dtype, device, contiguous memory
"""

import torch

from nanochat_gate import Unsupported, requirement, verify
from suites.dat import corpus
from suites.dat.reader import LENGTH, ROWS
from suites.dat.test_dealing import plain


def wrong_next(x, y):
    """Where y is no token that can follow x: the next of its document, BOS after its last, a first one after BOS."""
    place = (x - corpus.FIRST) % corpus.STRIDE
    number = (x - corpus.FIRST) // corpus.STRIDE
    lengths = torch.tensor([corpus.length(n) for n in range(1000)])
    in_text = x >= corpus.FIRST
    last = in_text & (place == lengths[number.clamp(0, 999)] - 1)
    start = (y == corpus.BOS) | ((y >= corpus.FIRST) & ((y - corpus.FIRST) % corpus.STRIDE == 0))
    wrong = torch.where(last, y != corpus.BOS, y != x + 1)
    return torch.where(in_text, wrong, ~start)


@requirement("DAT-04", "Targets are inputs shifted by one, at every position", sizes=(1, 2))
def test_shift(ranks, size):
    """A target that is not the next token teaches the model something else, with a loss that falls all the same."""
    for rank, of_rank in enumerate(plain(ranks, size)):
        x, y = of_rank["whole"]["x"], of_rank["whole"]["y"]
        verify(len(x) > 0, "batches", f"rank {rank} {of_rank['whole']['ended']}")
        expected = "target t is input t+1 within a row, and the token after the row at its end"
        off = (y[:, :, :-1] != x[:, :, 1:]).nonzero()
        verify(not len(off), expected, f"rank {rank}: {len(off)} differ, first in batch, row, t {off[:1].tolist()}")
        strange = wrong_next(x, y).nonzero()
        first = strange[:1].tolist()
        verify(not len(strange), expected, f"rank {rank}: {len(strange)} do not follow, first in batch, row, t {first}")


@requirement("DAT-05", "Every row starts with BOS", sizes=(2,))
def test_bos(ranks, size):
    """A row that starts in the middle of a text has the model predict from context that it was not given."""
    for rank, of_rank in enumerate(plain(ranks, size)):
        if "bos" not in of_rank["name"]:
            raise Unsupported(f"{of_rank['name']} streams documents over the ends of rows")
        first = of_rank["whole"]["x"][:, :, 0]
        other = int((first != corpus.BOS).sum())
        verify(other == 0, "BOS at the start of every row", f"rank {rank}: {other} of {first.numel()} rows do not")


@requirement("DAT-06", "Batches are contiguous (B, T) integers on the device that was asked for", sizes=(1, 2))
def test_form(ranks, size):
    """A batch on another device or of another dtype stops the model; one with gaps is copied in every step."""
    for rank, of_rank in enumerate(plain(ranks, size)):
        forms = of_rank["whole"]["form"]
        verify(len(forms) == 1, "every batch of the same form", f"rank {rank}: {forms or of_rank['whole']['ended']}")
        inputs, targets = forms[0]
        for name, form, dtypes in (("inputs", inputs, ("int64", "int32")), ("targets", targets, ("int64",))):
            expected = f"{name} ({ROWS}, {LENGTH}) {' or '.join(dtypes)} on cpu, contiguous"
            right = form[0] == [ROWS, LENGTH] and form[1].removeprefix("torch.") in dtypes
            verify(right and form[2] == "cpu" and form[3], expected, f"rank {rank}: {form}")
