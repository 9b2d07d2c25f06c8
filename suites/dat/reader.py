"""What the DAT suite does in ranks: open the target's loader, read batches, and say how the reading ended."""

import contextlib
import inspect
import os
import signal
import time

import torch

from nanochat_gate import Unsupported
from suites.dat.corpus import Tokenizer

# The loaders of nanochat's revisions, those that tell their position first.
NAMES = (
    "tokenizing_distributed_data_loader_with_state_bos_bestfit",
    "tokenizing_distributed_data_loader_with_state",
    "tokenizing_distributed_data_loader_bos_bestfit",
    "tokenizing_distributed_data_loader",
)
ROWS, LENGTH = 2, 32  # B and T of every batch
SPINS = 5  # s of this process's own CPU time between two batches that take milliseconds
PAUSE = 0.01  # s


class Spinning(BaseException):
    """The loader computes and computes and hands out nothing."""


def use(base):
    """Point the target at a base directory, before it is imported."""
    os.environ["NANOCHAT_BASE_DIR"] = base
    os.environ.pop("NANOCHAT_DATA_DIR", None)


def find(rank):
    """The loader's name and function."""
    module = rank.target.module("dataloader")
    for name in NAMES:
        if hasattr(module, name):
            return name, getattr(module, name)
    raise Unsupported(f"dataloader.py has none of {', '.join(NAMES)}")


def open_loader(rank, tokenizer, split, state=None):
    """The target's loader of ROWS x LENGTH batches on CPU."""
    module = rank.target.module("dataloader")
    _, function = find(rank)
    known = inspect.signature(function).parameters
    if "tokenizer" not in known:
        module.get_tokenizer = lambda: tokenizer
    anything = any(p.kind is p.VAR_KEYWORD for p in known.values())
    if not anything and "device" not in known:
        raise Unsupported("the loader takes no device: its batches go to CUDA")
    if state is not None and "resume_state_dict" not in known:
        raise Unsupported("the loader cannot resume")
    wanted = {"tokenizer_threads": 1, "tokenizer_batch_size": 5, "buffer_size": 4, "device": torch.device("cpu")}
    options = {name: value for name, value in wanted.items() if anything or name in known}
    if state is not None:
        options["resume_state_dict"] = state
    first = [tokenizer] if "tokenizer" in known else []
    return function(*first, ROWS, LENGTH, split, **options)


@contextlib.contextmanager
def spin_guard():
    """Raise Spinning in a block that burns SPINS seconds of CPU: time on the clock would judge a busy machine."""

    def stop(*_):
        raise Spinning

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SPINS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def read(rank, split, count, state=None, pause=0.0):
    """Read `count` batches; a dict.

    x, y: (batches, ROWS, LENGTH) int64 copies, fewer than `count` where the loader ended; states: a dict a batch, None
    where it tells no position; read: how many documents had been tokenized by then; log: their numbers; ended: "" or
    why it ended early; form: what is the same of every batch (shapes, dtypes, devices, contiguous), as text.
    """
    tokenizer = Tokenizer()
    said = {"x": [], "y": [], "states": [], "read": [], "ended": "", "form": []}
    try:
        with spin_guard():
            loader = iter(open_loader(rank, tokenizer, split, state))
            while len(said["x"]) < count:
                inputs, targets, *rest = next(loader)
                said["x"].append(inputs.long().clone())
                said["y"].append(targets.long().clone())
                position = rest[-1] if rest and isinstance(rest[-1], dict) else None
                said["states"].append(dict(position) if position is not None else None)
                said["read"].append(len(tokenizer.log))
                form = [[list(t.shape), str(t.dtype), str(t.device), t.is_contiguous()] for t in (inputs, targets)]
                if form not in said["form"]:
                    said["form"].append(form)
                signal.setitimer(signal.ITIMER_PROF, SPINS)
                time.sleep(pause)
    except Spinning:
        said["ended"] = f"computes for {SPINS} s and gives no batch"
    except Unsupported:
        raise
    except BaseException as error:
        said["ended"] = " ".join(f"raises {type(error).__name__}: {error}".split())
    empty = torch.zeros((0, ROWS, LENGTH), dtype=torch.long)
    said |= {name: torch.stack(said[name]) if said[name] else empty for name in ("x", "y")}
    return said | {"log": tokenizer.log}


def readings(rank, base, epoch_batches):
    """All readings of the plain corpus. epoch_batches: batches an epoch gives this rank, about."""
    use(base)
    if rank.rank % 2:
        _list_backwards()
    known = inspect.signature(find(rank)[1]).parameters
    whole = read(rank, "train", round(3.5 * epoch_batches))
    again = read(rank, "train", min(20, len(whole["x"])), pause=PAUSE * (rank.rank % 2))
    said = {"name": find(rank)[0], "whole": whole, "again": again, "val": read(rank, "val", 12), "resumed": {}}
    if "resume_state_dict" in known:
        # Packing crops texts, so an epoch gives fewer batches than its tokens would fill. A third of them before and
        # a third after the resume leave room for what it may skip, and do not reach the next epoch.
        epoch = sum(count <= len(set(whole["log"])) for count in whole["read"])
        for after in sorted({1, max(1, epoch // 6), max(1, epoch // 4), max(1, epoch // 3)}):
            if after <= len(whole["states"]) and whole["states"][after - 1] is not None:
                state = whole["states"][after - 1]
                said["resumed"][str(after)] = read(rank, "train", max(1, epoch // 3), state)
    return said


def _list_backwards():
    """List folders in another order than rank 0 sees: file systems promise none."""
    listdir, scandir = os.listdir, os.scandir

    class Backwards:
        def __init__(self, path):
            with scandir(path) as entries:
                self.entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))

        def __iter__(self):
            return self

        def __next__(self):
            return next(self.entries)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def close(self):
            pass

    os.listdir = lambda path=".": sorted(listdir(path), reverse=True)
    os.scandir = lambda path=".": Backwards(path)


def spoiled(rank, base, count):
    """One reading of a corpus that something is wrong with."""
    use(base)
    return read(rank, "train", count)
