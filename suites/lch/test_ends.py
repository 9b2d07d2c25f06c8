"""LCH: real torchrun, runs that are ended early.

LCH-03  an exception on one rank ends all of them, and is shown
LCH-04  SIGINT and SIGTERM end all ranks and leave a checkpoint that loads
"""

import inspect
import signal
from pathlib import Path

from nanochat_gate import Unsupported, requirement, script, verify
from suites.lch.launching import ended, last_error, needs_no_network, plan, run, verify_nothing_left
from suites.lch.wrapper import PLANTED
from suites.whole import new_base

FAILS_IN = 2  # a step in which every rank has something to wait for
SAVE_EVERY, HELD_AT = 2, 3
# Far more than a rank needs to notice a signal, and made within the 30 s after which torchrun kills what goes on.
STEPS = 40
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


@requirement(
    "LCH-03",
    "An exception on one rank ends the whole run under torchrun with a code other than 0 and that rank's traceback",
    claim="cpu",
    sizes=(2,),
)
def test_exception(ranks, size):
    """The other ranks wait for ever on rented GPUs, or the run passes for finished, or nobody learns what broke."""
    found = script.find(ranks.gate.target)
    rank = size - 1
    given = plan(ranks, found, size, new_base(ranks), fail=[rank, FAILS_IN], steps=STEPS)
    (report,) = run(ranks, given)
    what = f"when rank {rank} raises in step {FAILS_IN}"
    verify_reached(report, 1, f"step {FAILS_IN}")
    verify(report["code"] is not None, f"torchrun ends {what}", "it goes on until it is killed")
    verify(report["code"] != 0, f"torchrun ends with another code than 0 {what}", "it ends with code 0")
    output = report["output"]
    planted = f"{PLANTED}, on rank {rank}"
    verify(
        planted in output and "Traceback" in output,
        f"the output holds the traceback of rank {rank}, with {planted!r}",
        f"{'only the message' if planted in output else 'neither'}: {' '.join(' '.join(last_error(output)).split())}",
    )
    verify_nothing_left(report, f"{what} and torchrun has ended")


def verify_reached(report, steps, what):
    """Unsupported where a run ends for want of a network; else every rank came so far."""
    notes = report["notes"]
    reached = all(note is not None and note["steps"] >= steps for note in notes)
    if not reached:
        needs_no_network(report)
    verify(reached, f"every rank trains to {what}", ended(report))


def interrupted(ranks, size):
    """A run per signal, side by side: their reports, with the base directory of each."""

    def make():
        found = script.find(ranks.gate.target)
        bases = [new_base(ranks) for _ in SIGNALS]
        plans = [
            plan(ranks, found, size, base, send=send, hold=HELD_AT, steps=STEPS, save_every=SAVE_EVERY)
            for base, send in zip(bases, SIGNALS.values(), strict=True)
        ]
        reports = run(ranks, *plans)
        return {n: r | {"base": b} for n, r, b in zip(SIGNALS, reports, bases, strict=True)}

    return ranks.gate.shared(f"lch-interrupted-{size}", make)


def load_newest(rank, folder):
    """The newest checkpoint of a folder through the target's own module: its step and how many tensors it holds."""
    module = rank.target.module("checkpoint_manager")
    step = module.find_last_step(folder)
    options = {"load_optimizer": True, "rank": rank.rank}
    takes = inspect.signature(module.load_checkpoint).parameters
    loaded = module.load_checkpoint(folder, step, rank.device, **{k: v for k, v in options.items() if k in takes})
    return {"step": step, "tensors": len(loaded[0])}


@requirement(
    "LCH-04",
    "Ctrl-C and SIGTERM end all ranks of a run under torchrun and leave a newest checkpoint that loads",
    claim="cpu",
    sizes=(2,),
)
def test_signals(ranks, size):
    """Ranks live on with the GPU's memory when a job is cancelled, or the run can't go on from where it was."""
    for name, report in interrupted(ranks, size).items():
        verify_reached(report, HELD_AT, f"step {HELD_AT}")
        what = f"when torchrun is sent {name} after step {HELD_AT}"
        assert report["held"]
        verify(report["code"] is not None, f"torchrun ends {what}", "it goes on until it is killed")
        verify(report["code"] != 0, f"torchrun ends with another code than 0 {what}", "it ends with code 0")
        steps = max(note["steps"] for note in report["notes"])
        verify(steps < STEPS, f"all ranks end {what}", f"they train on to the last step, {steps}")
        verify_nothing_left(report, f"{what} and torchrun has ended")
    if "save_every" not in script.find(ranks.gate.target).flags:
        raise Unsupported("the training script saves at its end only: nothing to go on from after a signal")
    for name, report in interrupted(ranks, size).items():
        folders = sorted({file.parent for file in Path(report["base"]).glob("base_checkpoints/**/*.pt")})
        verify(
            bool(folders), f"{name} after step {HELD_AT} leaves the checkpoint of step {SAVE_EVERY}", "there is none"
        )
        for said in ranks(load_newest, str(folders[0]), size=size, fresh=True):
            verify(
                said["step"] >= SAVE_EVERY and said["tensors"] > 0,
                f"after {name} the newest checkpoint is at least of step {SAVE_EVERY} and has weights",
                f"it is of step {said['step']}, with {said['tensors']} tensors",
            )
