"""What ranks are made to do in the tests of the engine. Runs in rank processes."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist


def who(rank):
    return {"rank": rank.rank, "size": rank.size, "pid": os.getpid(), "group": dist.is_initialized()}


def draws(rank):
    return [random.random(), torch.rand(1).item(), int(torch.initial_seed())]


def environment(rank):
    return dict(os.environ)


def total(rank):
    tensor = torch.full((3,), float(rank.rank + 1))
    dist.all_reduce(tensor)
    return tensor


def raise_on(rank, which):
    if rank.rank == which:
        raise ValueError("this rank objects")
    dist.barrier()


def end_on(rank, which, how):
    if rank.rank == which:
        if how == "exit 0":
            os._exit(0)
        if how == "exit 3":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


def hang_on(rank, which):
    print(f"rank {rank.rank} was here", flush=True)
    if rank.rank != which:
        dist.all_reduce(torch.ones(5))


def mismatch(rank):
    dist.all_reduce(torch.ones(4))
    if rank.rank == 1:
        dist.barrier()
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(4))


def nothing(rank):
    return None


def change(rank, what):
    if what == "environment":
        os.environ["ADDED"] = "1"
    elif what == "dtype":
        torch.set_default_dtype(torch.float64)
    elif what == "patch":
        torch.cuda.is_available = lambda: True
    elif what == "folder":
        os.chdir("/")
    elif what == "threads":
        torch.set_num_threads(3)
    elif what == "target":
        rank.target.module("common").print0 = None


def leave_child(rank):
    """A child in a session of its own, as torchrun's workers are."""
    code = "import time; time.sleep(600)"
    return subprocess.Popen([sys.executable, "-c", code], start_new_session=True).pid


def start_children_for_ever(rank, file):
    """Children one after another, so that some are started while this rank is being killed."""

    def start():
        with open(file, "a") as pids:
            while True:
                pids.write(f"{subprocess.Popen(['sleep', '600'], start_new_session=True).pid}\n")
                pids.flush()

    threading.Thread(target=start, daemon=True).start()


def paths(rank):
    return [os.path.realpath(entry or os.getcwd()) for entry in sys.path]


def slow(rank, seconds):
    time.sleep(seconds)
    return rank.rank


def large(rank, numel):
    return torch.arange(numel)
