"""What torchrun starts in place of the target's script: notes what a rank does, plants what a test asks for, runs it.

`torchrun ... wrapper.py -- FLAGS` with GATE_SCRIPT, a JSON object:

    module, path  the script, and what goes on sys.path for it
    package       the target's import name
    standins      the file of the gate's stand-ins for packages that this machine lacks
    folder        where each rank leaves rank<r>.json: its pid, the world it is in, its optimizer steps so far
    fail          [rank, step]: raise there
    hold          after so many steps, wait for the signal that the driver sends once every rank has come so far
"""

import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path

PLANTED = "planted by the gate in a training step"
WAIT = 10.0  # s for a signal that may be ignored, and then never shows


def note(folder, rank, **facts):
    """Leave what is known of this rank, whole or not at all."""
    file = Path(folder) / f"rank{rank}.json"
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"pid": os.getpid(), "rank": rank, **facts}))
    partial.replace(file)


def watch(said, rank):
    """Hooks on the optimizer that makes the first step; a revision with several of them steps all once a step."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    seen = {"first": None, "steps": 0}

    def before(optimizer, args, kwargs):
        seen["first"] = seen["first"] or id(optimizer)
        if id(optimizer) == seen["first"] and [rank, seen["steps"] + 1] == said.get("fail"):
            raise ArithmeticError(f"{PLANTED}, on rank {rank}")

    def after(optimizer, args, kwargs):
        if id(optimizer) != seen["first"]:
            return
        seen["steps"] += 1
        world = dist.get_world_size() if dist.is_initialized() else 1
        note(said["folder"], rank, world=world, steps=seen["steps"])
        if seen["steps"] == said.get("hold"):
            hold(Path(said["folder"]) / f"rank{rank}.held")

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def hold(marker):
    """Say that this rank is here and go on once a signal has come, so that none comes while a checkpoint is written.

    A signal without a handler ends the process here; one whose handler raises leaves from here.
    """
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    former = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    marker.touch()
    try:
        select.select([ours], [], [], WAIT)
    finally:
        signal.set_wakeup_fd(former)


def load(file):
    """A module of the gate by its file: on sys.path it would bring along the reference, which is no target here."""
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    said = json.loads(os.environ.pop("GATE_SCRIPT"))
    sys.path[0] = said["path"]  # in place of this folder
    watch(said, int(os.environ["RANK"]))
    sys.argv = [said["module"], *sys.argv[1:]]
    load(said["standins"]).call_without(
        lambda: runpy.run_module(said["module"], run_name="__main__", alter_sys=True),
        said["package"],
        said["module"].split(".")[0],
    )


if __name__ == "__main__":
    main()
