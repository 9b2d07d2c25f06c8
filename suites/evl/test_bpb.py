"""EVL: bits per byte over ranks, from losses that add up exactly.

EVL-01  equal on all ranks, and equal to the formula over the union of their batches
EVL-02  ignored targets and tokens without bytes are left out
EVL-03  no bytes at all gives inf, on every rank (should)
EVL-04  a rank whose targets are all ignored still joins in
EVL-05  no gradients are recorded, and no more batches taken than asked for (should)
EVL-06  the target's own model: N ranks agree with one process on the union of the batches
"""

import itertools
import math

import torch

from nanochat_gate import Unsupported, requirement, verify
from suites.att.calls import words
from suites.att.models import randomised
from suites.steps import FLOAT32

VOCABULARY = 96
ROWS, LENGTH = 2, 16
BATCHES = 12  # dealt over the ranks
QUARTERS = 9  # the loss of a token is 1 to QUARTERS quarters of a nat


class Model(torch.nn.Module):
    """Gives the target y of input x a loss of ((x + y) % QUARTERS + 1) / 4 nats: sums are exact in any order."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.recorded = False

    def get_device(self):
        return self.weight.device

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        if loss_reduction != "none":
            raise Unsupported(f"evaluate_bpb asks its model for loss_reduction={loss_reduction!r}")
        self.recorded = self.recorded or torch.is_grad_enabled()
        loss = ((idx + targets) % QUARTERS + 1) / 4 * self.weight
        return torch.where(targets >= 0, loss, 0.0).flatten()


def batch(number, kind):
    """(x, y), each (ROWS, LENGTH) int64.

    kind: "plain"; "mixed", where some targets are ignored and some without bytes; "none", where all are.
    """
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(1, VOCABULARY, (2, ROWS, LENGTH), generator=generator)
    if kind == "mixed":
        y[torch.rand(y.shape, generator=generator) < 0.3] = -1
        y[torch.rand(y.shape, generator=generator) < 0.2] = 0
    elif kind == "none":
        y[:, ::2], y[:, 1::2] = -1, 0
    return x, y


def token_bytes():
    """Bytes per token: none for token 0, a special one."""
    return torch.tensor([0, *(1 + n % 7 for n in range(1, VOCABULARY))], dtype=torch.int32)


def kind_of(kind, number, size):
    """In the case "one rank", all batches of the last rank have nothing that counts."""
    return kind if kind != "one rank" else "none" if number % size == size - 1 else "mixed"


def evaluate(rank, kind):
    """evaluate_bpb on this rank's share of the batches, and how the model was called and the batches taken."""
    function = rank.target.module("loss_eval").evaluate_bpb
    taken = []

    def batches():
        for number in itertools.count(rank.rank, rank.size):
            taken.append(number)
            yield batch(number, kind_of(kind, number, rank.size))

    model = Model()
    bpb = function(model, batches(), BATCHES // rank.size, token_bytes())
    return {"bpb": float(bpb), "taken": taken, "recorded": model.recorded}


def formula(kind, size):
    """Total nats / (ln 2 * total bytes) over the targets that have bytes."""
    nats, total = 0, 0
    sizes = token_bytes().tolist()
    for number in range(BATCHES):
        x, y = batch(number, kind_of(kind, number, size))
        for one, target in zip(x.flatten().tolist(), y.flatten().tolist(), strict=True):
            if target >= 0 and sizes[target]:
                nats += ((one + target) % QUARTERS + 1) / 4
                total += sizes[target]
    return nats / (math.log(2) * total) if total else math.inf


def run(ranks, size, kind):
    return ranks(evaluate, kind, size=size, group="target" if size > 1 or ranks.facts.alone else None)


def verify_bpb(said, want, what):
    """One division is all that rounds, in fp32 where the target divides tensors."""
    for rank, of_rank in enumerate(said):
        bpb = of_rank["bpb"]
        same = bpb == want or (math.isfinite(want) and abs(bpb - want) <= 2**-22 * want)
        verify(same, f"{what}: {want!r} bits per byte", f"rank {rank} of {len(said)} says {bpb!r}")
    equal = len({of_rank["bpb"] for of_rank in said}) == 1
    verify(equal, "the same on all ranks", ", ".join(repr(of_rank["bpb"]) for of_rank in said))


@requirement("EVL-01", "Bits per byte are those of the union of all ranks' batches, on every rank", sizes=(1, 2, 3, 4))
def test_union(ranks, size):
    """Rank 0's share alone, or a mean of ratios, is another number at every world size."""
    verify_bpb(run(ranks, size, "plain"), formula("plain", size), f"{BATCHES} batches")


@requirement("EVL-02", "Ignored targets and tokens without bytes count in neither sum", sizes=(1, 2, 3))
def test_left_out(ranks, size):
    """Nats of special tokens over bytes of text is no measure of the text, and looks like a worse model."""
    verify_bpb(run(ranks, size, "mixed"), formula("mixed", size), "with ignored targets and special tokens")


@requirement("EVL-03", "No bytes at all give inf", level="should", sizes=(1, 2))
def test_no_bytes(ranks, size):
    """A division by zero ends the run; a zero is the best score there is."""
    verify_bpb(run(ranks, size, "none"), math.inf, "no target has bytes")


@requirement("EVL-04", "A rank without a target that counts joins in all the same", sizes=(2, 3))
def test_one_rank(ranks, size):
    """A rank that leaves early leaves the others waiting in the collective for ever."""
    verify_bpb(run(ranks, size, "one rank"), formula("one rank", size), "the last rank has nothing that counts")


@requirement(
    "EVL-05", "Evaluation records no gradients and takes just the batches asked for", level="should", sizes=(2,)
)
def test_economy(ranks, size):
    """A recorded graph doubles the memory of an evaluation, and a batch too many may never come."""
    for rank, of_rank in enumerate(run(ranks, size, "plain")):
        verify(not of_rank["recorded"], "gradients are off in the model's forward pass", f"they are on at rank {rank}")
        want, got = BATCHES // size, len(of_rank["taken"])
        verify(got == want, f"{want} batches taken", f"rank {rank} takes {got}")


def evaluate_model(rank, claimed):
    """evaluate_bpb of the target's own model on this rank's share."""
    model = randomised(rank, n_layer=2)
    if not hasattr(model, "get_device"):
        model.get_device = lambda: torch.device("cpu")
    shares = (batch(number, "mixed") for number in range(rank.rank, BATCHES, rank.size))
    evaluate_bpb = rank.target.module("loss_eval").evaluate_bpb
    try:
        model(*batch(0, "plain"), loss_reduction="none")
    except Exception as error:
        if claimed:
            raise
        raise Unsupported(f"its model does not run in fp32 on cpu: {words(error)}") from error
    return float(evaluate_bpb(model, shares, BATCHES // rank.size, token_bytes()))


@requirement("EVL-06", "The model's bits per byte on N ranks are those of one process", sizes=(2, 3))
def test_model(ranks, size):
    """The number that runs are compared by must not depend on how many ranks computed it."""
    claimed = "cpu" in ranks.facts.claims
    want = ranks.single(evaluate_model, claimed, env=FLOAT32)
    # fp32 sums of some hundred losses, in another order: a few roundings of 2^-24 each.
    for rank, bpb in enumerate(ranks(evaluate_model, claimed, size=size, env=FLOAT32)):
        told = f"rank {rank} of {size} says {bpb!r}"
        verify(abs(bpb - want) <= 2**-20 * want, f"{want!r} bits per byte, as one process says", told)
