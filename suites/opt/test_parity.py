"""OPT: the sharded optimizer against single-process training, on the target's own model and setup.

OPT-01  as it stands
OPT-02  with results withheld until they are waited for
OPT-03  with a vocabulary that does not divide by the number of ranks
"""

import pytest

from nanochat_gate import requirement
from suites.opt.groups import model_parity
from suites.opt.judging import check_parity

STEPS = 5
# Three layers make six and three matrices of a shape, which 2 and 4 ranks must pad.
CONFIG = {"n_layer": 3}
# 193 is prime. Targets pad it, or not; at 3 ranks stock nanochat refuses its padded 256, which is fair.
ODD = {"vocab_size": 193, "n_layer": 2}


@pytest.mark.core
@requirement("OPT-01", "Sharded steps as they stand equal one process's bit for bit", claim="cpu", sizes=(2, 3, 4))
def test_as_it_stands(ranks, size, backend):
    """A step that averages, slices or gathers wrongly trains another model than one process would."""
    check_parity(ranks, model_parity, STEPS, CONFIG, size=size, backend=backend, lane="plain")


@pytest.mark.core
@requirement("OPT-02", "Sharded steps equal one process's bit for bit, with results withheld", sizes=(2, 3, 4))
def test_withheld(ranks, size, backend):
    """A result used before its wait is right on a quiet machine and wrong on a busy one."""
    check_parity(ranks, model_parity, STEPS, CONFIG, size=size, backend=backend)


@requirement("OPT-03", "A vocabulary that does not divide by the ranks trains as on one process", sizes=(2, 4))
def test_odd_vocabulary(ranks, size, backend):
    """A tokenizer of any other size than a round one ends the run, or leaves its last tokens untrained."""
    check_parity(ranks, model_parity, 2, ODD, size=size, backend=backend)
