"""OPT: hand-built groups against single-process training, for what the target's own model may not have.

OPT-04  Muon groups of K matrices on N ranks: K = 1, K < N, K = N, K not divisible by N; tall, wide and square
OPT-05  AdamW parameters just under and over 1024 elements, with one to three dimensions
"""

from nanochat_gate import requirement
from suites.opt.groups import ADAMW, MUON, group_parity
from suites.opt.judging import check_parity

SHAPES = {"tall": [24, 8], "wide": [8, 24], "square": [12, 12]}
COUNTS = (1, 2, 3, 4, 5, 7)
MATRICES = [{"name": f"{K} {kind}", "shapes": [shape] * K, **MUON} for K in COUNTS for kind, shape in SHAPES.items()]
# Dim 0 and the elements of a slice divide by 2, 3 and 4 ranks; slices are multiples of 16 elements, since torch's
# vectorised kernels may round the rest of a division by the vector's width otherwise.
VECTORS = [
    {"name": "under 1024", "shapes": [[192], [48, 4], [12, 80]], **ADAMW},
    {"name": "over 1024", "shapes": [[12, 96], [1152], [48, 4, 8], [96, 32]], **ADAMW},
]


@requirement("OPT-04", "Muon groups of any number and shape of matrices step as on one process", sizes=(2, 3, 4))
def test_muon_groups(ranks, size, backend):
    """A rank that owns no matrix, or padding that leaks into one, shows only at some depths and world sizes."""
    check_parity(ranks, group_parity, 3, MATRICES, size=size, backend=backend)


@requirement("OPT-05", "AdamW parameters under and over 1024 elements step as on one process", sizes=(2, 3, 4))
def test_adamw_groups(ranks, size, backend):
    """Small parameters take a path of their own; one that is not averaged there drifts apart between ranks."""
    check_parity(ranks, group_parity, 3, VECTORS, size=size, backend=backend)
