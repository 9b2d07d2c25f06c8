"""CKP: which files make a checkpoint.

CKP-05  the last step is the highest number
CKP-06  other files in the folder are left alone (should)
CKP-12  so it is when the steps have seven digits (should)
CKP-10  a run killed while it saves leaves nothing that is found and does not load (should)
"""

import pytest

from nanochat_gate import requirement, verify
from suites.ckp.saved import killed, last_step
from suites.ckp.test_resume import folder

STEPS = [9, 1000, 10, 999]
MANY = [999999, 1000000, 9]  # names of seven digits no longer sort by text after those of six
STRAYS = ["model_best.pt", "model_000123.pt.bak", "notes.txt", "model_.pt", "meta_best.json"]


def alone(ranks, function, *args):
    return ranks(function, *args, size=1, group=None, torchrun=False, fresh=True)[0]


@requirement("CKP-05", "The last step of a folder is the highest number")
def test_order(ranks):
    """A run that resumes from a step before the last trains it again and overwrites what came after."""
    found = alone(ranks, last_step, folder(ranks, "order"), STEPS, [])
    verify(found == max(STEPS), f"of steps {STEPS} find_last_step says {max(STEPS)}", f"it says {found}")


@requirement("CKP-12", "The last step is the highest number past a million too", level="should")
def test_many(ranks):
    """A run of very small steps that resumes goes back to 999999 for ever."""
    found = alone(ranks, last_step, folder(ranks, "many"), MANY, [])
    verify(found == max(MANY), f"of steps {MANY} find_last_step says {max(MANY)}", f"it says {found}")


@requirement("CKP-06", "Files that are no checkpoint do not matter", level="should")
def test_strays(ranks):
    """One copy made by hand, and no checkpoint of the run loads."""
    found = alone(ranks, last_step, folder(ranks, "strays"), [3, 12], STRAYS)
    verify(found == 12, f"beside {', '.join(STRAYS)} find_last_step says 12", f"it says {found}")


@requirement("CKP-10", "A run killed while it saves leaves no half checkpoint that is found", level="should")
@pytest.mark.parametrize("file", [1, 2])
def test_killed(ranks, file):
    """The next start finds the newest step, fails to load it, and somebody has to know which files to delete."""
    last, wrong = alone(ranks, killed, folder(ranks, f"killed-{file}"), file)
    expected = f"killed half-way through file {file} of step 2, the last step found loads"
    verify(not wrong, expected, f"step {last} is found and does not: {wrong}")
