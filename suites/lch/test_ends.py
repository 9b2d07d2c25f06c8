"""LCH: real torchrun, runs that are ended early.

LCH-03  an exception on one rank ends all of them, and is shown
LCH-04  SIGINT and SIGTERM end all ranks and leave a checkpoint that loads
"""

import inspect
from pathlib import Path

import pytest

from nanochat_gate import Unsupported, requirement, script, verify
from suites.lch.launching import last_error, verify_nothing_left
from suites.lch.runs import FAILS_IN, HELD_AT, LONG, SAVE_EVERY, SIGNALS, launched, verify_reached
from suites.lch.wrapper import PLANTED


@requirement(
    "LCH-03",
    "An exception on one rank ends the whole run under torchrun with a code other than 0 and that rank's traceback",
    claim="cpu",
    sizes=(2,),
)
def test_exception(ranks, size):
    """The other ranks wait for ever on rented GPUs, or the run passes for finished, or nobody learns what broke."""
    rank = size - 1
    report = launched(ranks, size, "raises")
    what = f"when rank {rank} raises in step {FAILS_IN}"
    verify_reached(report, FAILS_IN - 1, f"step {FAILS_IN - 1}")
    verify_ended(report, what)
    output = report["output"]
    planted = f"{PLANTED}, on rank {rank}"
    verify(
        planted in output and "Traceback" in output,
        f"the output holds the traceback of rank {rank}, with {planted!r}",
        f"{'only the message' if planted in output else 'neither'}: {' '.join(' '.join(last_error(output)).split())}",
    )
    verify_nothing_left(report, f"{what} and torchrun has ended")


def verify_ended(report, what):
    verify(report["code"] is not None, f"torchrun ends {what}", "it goes on until it is killed")
    verify(report["code"] != 0, f"torchrun ends with another code than 0 {what}", "it ends with code 0")


def load_newest(rank, folder):
    """The newest checkpoint of a folder through the target's own module: its step and how many tensors it holds."""
    module = rank.target.module("checkpoint_manager")
    step = module.find_last_step(folder)
    options = {"load_optimizer": True, "rank": rank.rank}
    takes = inspect.signature(module.load_checkpoint).parameters
    loaded = module.load_checkpoint(folder, step, rank.device, **{k: v for k, v in options.items() if k in takes})
    return {"step": step, "tensors": len(loaded[0])}


@pytest.mark.parametrize("name", list(SIGNALS))
@requirement(
    "LCH-04",
    "Ctrl-C and SIGTERM end all ranks of a run under torchrun and leave a newest checkpoint that loads",
    claim="cpu",
    sizes=(2,),
)
def test_signal(ranks, size, name):
    """Ranks live on with the GPU's memory when a job is cancelled, or the run can't go on from where it was."""
    report = launched(ranks, size, name)
    what = f"when torchrun is sent {name} after step {HELD_AT}"
    verify_reached(report, HELD_AT, f"step {HELD_AT}")
    assert report["held"]
    verify_ended(report, what)
    steps = max(note["steps"] for note in report["notes"])
    verify(steps < LONG, f"all ranks end {what}", f"they train on to the last step, {steps}")
    verify_nothing_left(report, f"{what} and torchrun has ended")
    if "save_every" not in script.find(ranks.gate.target).flags:
        raise Unsupported("the training script saves at its end only: nothing to go on from after a signal")
    folders = sorted({Path(file).parent for file in report["saved"] if file.endswith(".pt")})
    mine = [folder for folder in folders if report["checkpoints"] in ("", str(folder))]
    verify(bool(mine), f"the checkpoint of step {SAVE_EVERY} is there {what}", "there is none")
    for said in ranks(load_newest, str(mine[0]), size=size, fresh=True):
        verify(
            said["step"] >= SAVE_EVERY and said["tensors"] > 0,
            f"the newest checkpoint is at least of step {SAVE_EVERY} and has weights {what}",
            f"it is of step {said['step']}, with {said['tensors']} tensors",
        )
