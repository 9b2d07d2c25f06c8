"""The other side of a world: the loop each rank runs, and what a rank function is given.

A rank function is a module-level function of a suite, `def steps(rank, count): ...`. It gets a `Rank` and JSON
arguments, runs on every rank of a world at once, and returns tensors, numbers, strings, or lists and dicts of them.
Targets are imported here, and only here.
"""

from __future__ import annotations

import faulthandler
import hashlib
import importlib.util
import os
import random
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

from nanochat_gate import adapt, observe, wire
from nanochat_gate.requirement import Blocked, NotTested, Unsupported, Violation

ROOT = Path(__file__).resolve().parent.parent


class Rank:
    """One rank of a world, as a rank function sees it.

    rank, size: this process and the number of processes; local_rank equals rank (one machine).
    device:     where the target's tensors go: the CPU, or `cuda:rank` for NCCL.
    target:     the nanochat under test (see adapt.Target); imported at its first use.
    recorder:   the collectives of this call (see observe.Recorder).
    """

    def __init__(self, spec: dict[str, Any], recorder: observe.Recorder) -> None:
        self.rank: int = spec["rank"]
        self.size: int = spec["size"]
        self.backend: str = spec["backend"]
        self.recorder = recorder
        self.device = torch.device("cuda", self.rank) if self.backend == "nccl" else torch.device("cpu")
        self.target = adapt.Target(spec["target"])
        self._spec = spec

    def rendezvous(self) -> None:
        """Move to a store nobody has used, so that a process group can be made (again) in this process."""
        if self._spec["ports"]:
            os.environ["MASTER_PORT"] = str(self._spec["ports"].pop(0))

    def join(self) -> None:
        """Make this rank part of a process group: the target's own where it makes one, else one we provide."""
        if self._spec["group"] == "target":
            self.target.compute_init(self.device.type)
        if not dist.is_initialized():
            if self.backend == "nccl":
                torch.cuda.set_device(self.device)
            dist.init_process_group(self.backend, "env://", rank=self.rank, world_size=self.size)
        if dist.get_world_size() != self.size:
            raise RuntimeError(f"the process group has {dist.get_world_size()} ranks where {self.size} were started")

    def group_backend(self) -> str:
        """What moves this rank's tensors in the default group: "gloo", "nccl", or "" without a group.

        dist.get_backend() says "undefined" of a group made for every device at once.
        """
        if not dist.is_initialized():
            return ""
        try:
            return str(dist.group.WORLD._get_backend(self.device).name()).lower()  # type: ignore[union-attr]
        except RuntimeError:  # a group that does not serve this device
            return dist.get_backend()


def reseed(call: str, rank: int) -> None:
    """Different on every rank, so that weights which are equal only by a shared seed do not stay hidden."""
    seed = int.from_bytes(hashlib.sha256(f"{call}/{rank}".encode()).digest()[:4], "big")
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def resolve(file: str, name: str) -> Callable[..., Any]:
    """The function `name` of a suite file, imported under the name pytest's importlib mode gives it."""
    path = Path(file)
    module_name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    module = sys.modules.get(module_name)
    if module is None:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
    function: Callable[..., Any] = getattr(module, name)
    return function


def state_digest(target: adapt.Target) -> dict[str, Any]:
    """What a later call on this world could trip over if a call changed it."""
    watched: dict[str, Any] = {
        "environment": {k: v for k, v in os.environ.items() if k != "MASTER_PORT"},
        "folder": os.getcwd(),
        "default dtype": str(torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "group": id(dist.group.WORLD) if dist.is_initialized() else 0,
        "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGUSR1)],
    }
    for module in (torch, dist, torch.nn.functional, torch.cuda, torch.optim, torch.backends.cuda, os):
        watched[module.__name__] = {k: id(v) for k, v in vars(module).items() if not k.startswith("__")}
    for name, module in target.modules().items():
        plain = (bool, int, float, str, type(None), torch.dtype)
        watched[name] = {k: v if isinstance(v, plain) else id(v) for k, v in vars(module).items()}
    return watched


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """The first thing that differs, or "". Modules that a call imported for the first time are no change."""
    for key, old in before.items():
        new = after.get(key)
        if new == old:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            for name in old:
                if new.get(name, ...) != old[name]:
                    return f"{key}: {name}"
            if key == "environment":
                return f"{key}: {', '.join(sorted(set(new) - set(old)))}"
            continue
        return key
    return ""


def describe(error: BaseException, target: adapt.Target) -> dict[str, Any]:
    """An exception as plain data: its kind for the verdict, its words, the target's line it came from."""
    kind = type(error).__name__ if isinstance(error, (Violation, Unsupported, Blocked, NotTested)) else "error"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if observe.is_target(f.filename, target.root)]
    where = f"{os.path.relpath(frames[-1].filename, target.root)}:{frames[-1].lineno}" if frames else ""
    words = " ".join(str(error).split())
    return {
        "kind": kind,
        "text": f"{type(error).__name__}: {words}" if kind == "error" else words,
        "where": where,
        "fields": {k: v for k, v in vars(error).items() if isinstance(v, str)},
        "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
    }


def serve(control: socket.socket, spec: dict[str, Any]) -> int:
    """Run calls from `control` until it closes. Returns the exit code of the rank."""
    os.environ.clear()
    os.environ.update(spec["env"])
    os.chdir(spec["cwd"])
    stacks = open(spec["stacks"], "w")  # noqa: SIM115 - open as long as the process lives
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    sys.path.insert(0, spec["target"]["import_root"])
    recorder = observe.Recorder(
        observe.Trace(spec["trace"]), spec["target"]["root"], spec["lane"] != "plain", spec["lane"] == "withheld"
    )
    observe.install(recorder)
    rank = Rank(spec, recorder)
    joined = spec["group"] is None
    reader = wire.Reader(control)
    before: dict[str, Any] = {}
    while (request := reader.wait()) is not None:
        call = request[0]
        recorder.clear()
        reseed(call["call"], rank.rank)
        try:
            if not joined:
                rank.rendezvous()
                rank.join()
                reseed(call["call"], rank.rank)
                joined = True
                recorder.clear()
            function = resolve(call["file"], call["name"])
            before = before or state_digest(rank.target)
            blob = wire.pack(function(rank, *call["args"]))
            after = state_digest(rank.target)
            difference, before = changed(before, after), after
            control.sendall(wire.frame({"call": call["call"], "ok": True, "changed": difference}, blob))
        except BaseException as error:
            try:
                control.sendall(wire.frame({"call": call["call"], "ok": False, "error": describe(error, rank.target)}))
            except BrokenPipeError:
                return 1  # nobody listens any more: the world is being killed, and its log is read as it is now
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                return 1
    return 0
