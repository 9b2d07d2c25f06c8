"""Collectives recorded, and withheld until they are waited for.

`install()` wraps the functions of `torch.distributed` before any target code is imported, in every rank.

observed   each call is noted (operation, shapes, dtypes, group, the target's line) and passed through unchanged.
withheld   each asynchronous call runs on scratch copies. The real output is filled with NaN (the caller's own slice
           of it spared) and gets its values only at the wait, so a result that is used without waiting, or a wait
           that was dropped, poisons the run every time instead of once in many. Inputs must not change in between.
           See withheld. Inside `with recorder.prompt():` results are there at the launch instead.

What reaches c10d without passing a wrapper is noted as bypassed: it was not observed and must not be called correct.
It is seen where a process group's or a backend's methods are called and where c10d's operators are, C++ included.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from nanochat_gate import withheld

# operation -> (arguments it reads, arguments it writes); of names separated by / a torch version has one.
OPERATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_reduce": (("tensor",), ("tensor",)),
    "broadcast": (("tensor",), ("tensor",)),
    "reduce": (("tensor",), ("tensor",)),
    "reduce_scatter": (("input_list",), ("output",)),
    "reduce_scatter_single": (("input/input_tensor",), ("output/output_tensor",)),
    "reduce_scatter_tensor": (("input/input_tensor",), ("output/output_tensor",)),
    "_reduce_scatter_base": (("input/input_tensor",), ("output/output_tensor",)),
    "all_gather": (("tensor",), ("tensor_list",)),
    "all_gather_single": (("input_tensor/input",), ("output_tensor/output",)),
    "all_gather_into_tensor": (("input_tensor/input",), ("output_tensor/output",)),
    "_all_gather_base": (("input_tensor/input",), ("output_tensor/output",)),
    "gather": (("tensor",), ("gather_list",)),
    "scatter": (("scatter_list",), ("tensor",)),
    "all_to_all": (("input_tensor_list",), ("output_tensor_list",)),
    "all_to_all_single": (("input/input_tensor",), ("output/output_tensor",)),
    "barrier": ((), ()),
}
# One name for what two torch versions call differently.
CANONICAL = {
    "reduce_scatter_tensor": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_gather_into_tensor": "all_gather_single",
    "_all_gather_base": "all_gather_single",
}
# Whose shapes may differ between ranks that all do right.
UNEVEN_READS = ("all_gather", "scatter", "all_to_all", "all_to_all_single")
UNEVEN_WRITES = ("reduce_scatter", "gather", "all_to_all", "all_to_all_single")
# How the names begin of a process group's and a backend's methods, and of c10d's operators, that move data.
METHODS = (
    *("allreduce", "reduce", "broadcast", "allgather", "all_gather", "alltoall", "all_to_all"),
    *("gather", "scatter", "send", "recv"),
)
TRACE_BYTES = 1 << 18
_HEAD = struct.Struct("!I")
_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(os.path.join(_ROOT, folder, "") for folder in ("nanochat_gate", "suites", "tests", "bench"))
_INSTALLED = f"{os.sep}site-packages{os.sep}"


def is_target(file: str, root: str) -> bool:
    """Whether a source file is the target's own: under its root, and neither ours nor an installed package."""
    return file.startswith(os.path.join(root, "")) and not file.startswith(_OURS) and _INSTALLED not in file


class Trace:
    """The signatures of a rank's collectives in a memory-mapped file, readable after the rank hangs or dies."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), TRACE_BYTES)
        self.clear()

    def clear(self) -> None:
        self._map[: _HEAD.size] = _HEAD.pack(0)

    def write(self, line: str) -> None:
        (size,) = _HEAD.unpack(self._map[: _HEAD.size])
        data = line.encode() + b"\n"
        start = _HEAD.size + size
        if start + len(data) <= TRACE_BYTES:
            self._map[start : start + len(data)] = data
            self._map[: _HEAD.size] = _HEAD.pack(size + len(data))


def read_trace(path: str) -> list[str]:
    """Signatures in the order the rank issued them, each `operation reduction dtype shapes  file:line`."""
    with open(path, "rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return []
        return file.read(_HEAD.unpack(head)[0]).decode(errors="replace").splitlines()


class _Depth(threading.local):
    value = 0


class Recorder:
    """What one rank did with collectives since `clear`.

    events:   one plain dict a collective, fit to cross to pytest:
              seq, op, reduction, dtype, reads and writes (shapes), layouts (of what is not contiguous: "gaps in"),
              bytes_read, bytes_written, async, where (the target's line), group ("" for all ranks, else "0,2"),
              waited (None where this lane cannot tell), touched ("" or what happened to its tensors in flight).
    bypassed: `method  file.py:12` of each that reached c10d unobserved.
    before:   called with the event of each collective before it is launched.
    """

    def __init__(self, trace: Trace, root: str, withhold: bool, provide_futures: bool) -> None:
        self.trace = trace
        self.root = root
        self.withhold = withhold
        self.provide_futures = provide_futures
        self.before: Callable[[dict[str, Any]], None] | None = None
        self.events: list[dict[str, Any]] = []
        self.bypassed: list[str] = []
        self._prompt = False
        self._but: int | None = None
        self._depth = _Depth()
        self.library: torch.library.Library | None = None  # watches as long as it lives

    def clear(self) -> None:
        self.events = []
        self.bypassed = []
        self.before = None
        self.trace.clear()

    @property
    def depth(self) -> int:
        """How many calls that are not the target's own this thread is in."""
        return self._depth.value

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls made inside are the gate's own or part of a call already noted."""
        self._depth.value += 1
        try:
            yield
        finally:
            self._depth.value -= 1

    @contextlib.contextmanager
    def prompt(self, but: int | None = None) -> Iterator[None]:
        """Collectives launched inside are finished at once, save the one whose `seq` is `but`. For withheld lanes."""
        self._prompt, self._but = True, but
        try:
            yield
        finally:
            self._prompt, self._but = False, None

    def caller(self) -> str:
        """`file.py:12` of the innermost target frame, relative to the target; "" when called by the gate."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if is_target(name, self.root):
                return f"{os.path.relpath(name, self.root)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def note(self, name: str, bound: dict[str, Any], outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        reads, writes = ([list(t.shape) for t in tensors] for tensors in (inputs, outputs))
        op = bound.get("op")
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in (*inputs, *outputs)})
        sides = [(t, "in place" if any(t is o for o in outputs) else "in") for t in inputs]
        sides += [(t, "out") for t in outputs if not any(t is i for i in inputs)]
        members = dist.get_process_group_ranks(bound.get("group"))
        later = bool(bound.get("async_op"))
        event = {
            "seq": len(self.events),
            "op": CANONICAL.get(name, name),
            "reduction": str(op).rsplit(".", 1)[-1] if op is not None else "-",
            "dtype": ",".join(dtypes) or "-",
            "reads": reads,
            "writes": writes,
            "layouts": sorted({f"{layout} {side}" for t, side in sides if (layout := withheld.layout(t))}),
            "bytes_read": sum(t.numel() * t.element_size() for t in inputs),
            "bytes_written": sum(t.numel() * t.element_size() for t in outputs),
            "async": later,
            "where": self.caller(),
            "group": "" if len(members) == dist.get_world_size() else ",".join(map(str, members)),
            "waited": (False if self.withhold else None) if later else True,
            "touched": "",
        }
        self.events.append(event)
        self.trace.write(f"{signature(event)}  {event['where']}")
        if self.before is not None:
            self.before(event)
        return event

    def bypass(self, what: str) -> None:
        self.bypassed.append(f"{what}  {self.caller()}")


def signature(event: dict[str, Any]) -> str:
    """What must agree across the ranks of its group for one collective."""
    reads = "" if event["op"] in UNEVEN_READS else event["reads"]
    writes = "" if event["op"] in UNEVEN_WRITES else event["writes"]
    shapes = f"{reads} -> {writes}".strip() if reads or writes else ""
    group = f"among {event['group']}" if event["group"] else ""
    return " ".join(part for part in (event["op"], event["reduction"], event["dtype"], shapes, group) if part)


def _wrap(name: str, original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    parameters = inspect.signature(original)
    reads, writes = (tuple(_present(n, parameters, name) for n in names) for names in OPERATIONS[name])

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recorder.depth or not dist.is_initialized():
            return original(*args, **kwargs)
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        bound = call.arguments
        group = bound.get("group")
        if dist.get_rank(group) < 0:  # nothing is issued by a rank that is not in the group
            return original(*args, **kwargs)
        inputs, outputs = withheld.tensors(bound, reads), withheld.tensors(bound, writes)
        event = recorder.note(name, bound, outputs, inputs)
        with recorder.quiet():
            if not (recorder.withhold and event["async"]) or _coalescing(group):
                event["waited"] = event["waited"] or _coalescing(group)
                return original(*args, **kwargs)
            if recorder._prompt and event["seq"] != recorder._but:
                return withheld.launch_prompt(original, bound, outputs, event, recorder)
            return withheld.launch(original, bound, reads, writes, event, recorder)

    return wrapper


def _present(names: str, parameters: inspect.Signature, operation: str) -> str:
    for name in names.split("/"):
        if name in parameters.parameters:
            return name
    raise TypeError(f"torch.distributed.{operation}{parameters} has none of {names}: it cannot be observed")


def _coalescing(group: Any) -> bool:
    """Inside torch's coalescing manager a call is only put on a list; what is then sent shows up as bypassed."""
    state = getattr(distributed_c10d._world, "pg_coalesce_state", {})
    return (group or dist.group.WORLD) in state


def _watch_methods(recorder: Recorder) -> None:
    for cls in (dist.ProcessGroup, torch._C._distributed_c10d.Backend):
        for name in dir(cls):
            if name.lstrip("_").startswith(METHODS):
                setattr(cls, name, _watched(f"{cls.__name__}.{name}", getattr(cls, name), recorder))


def _watched(name: str, original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        if not recorder.depth:
            recorder.bypass(name)
        with recorder.quiet():
            return original(*args, **kwargs)

    return method


def _watch_operators(recorder: Recorder) -> torch.library.Library:
    """See what reaches c10d's operators, also from C++ and in any thread, at no cost to other operators."""
    library = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
    after = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        namespace, _, name = full_name.partition("::")
        if namespace == "c10d" and name.lstrip("_").startswith(METHODS):
            relay = _relay(getattr(torch.ops.c10d, name).default, after, recorder)
            library.impl(name, relay, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
    return library


def _relay(operator: Any, after: Any, recorder: Recorder) -> Callable[..., Any]:
    def relay(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if not recorder.depth:
            recorder.bypass(str(operator))
        return operator.redispatch(keyset & after, *args, **kwargs)

    return relay


def install(recorder: Recorder) -> None:
    """Wrap torch.distributed in this process. Call once, before any target code is imported."""
    for name in OPERATIONS:
        original = getattr(distributed_c10d, name, None)
        if original is None:
            continue
        wrapped = _wrap(name, original, recorder)
        for module in (distributed_c10d, dist):
            if hasattr(module, name):
                setattr(module, name, wrapped)
    _watch_methods(recorder)
    recorder.library = _watch_operators(recorder)
    if recorder.withhold:
        for name, replacement in (("collect_all", withheld.collect_all), ("wait_all", withheld.wait_all)):
            setattr(torch.futures, name, functools.partial(replacement, getattr(torch.futures, name)))
