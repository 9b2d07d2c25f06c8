"""Collectives recorded, and withheld until they are waited for.

`install()` wraps the functions of `torch.distributed` before any target code is imported, in every rank.

observed   each call is noted (operation, shapes, dtypes, the target's line) and passed through unchanged.
withheld   each asynchronous call runs on scratch copies. The real output is filled with NaN (the caller's own slice
           of it spared) and gets its values only at the wait, so a result that is used without waiting, or a wait
           that was dropped, poisons the run every time instead of once in many. Inputs must not change in between.

What reaches c10d without passing a wrapper is noted as bypassed: it was not observed and must not be called correct.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import mmap
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

# operation -> (arguments it reads, arguments it writes)
OPERATIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "all_reduce": (("tensor",), ("tensor",)),
    "broadcast": (("tensor",), ("tensor",)),
    "reduce": (("tensor",), ("tensor",)),
    "reduce_scatter": (("input_list",), ("output",)),
    "reduce_scatter_single": (("input",), ("output",)),
    "reduce_scatter_tensor": (("input",), ("output",)),
    "_reduce_scatter_base": (("input",), ("output",)),
    "all_gather": (("tensor",), ("tensor_list",)),
    "all_gather_single": (("input",), ("output",)),
    "all_gather_into_tensor": (("input_tensor",), ("output_tensor",)),
    "_all_gather_base": (("input_tensor",), ("output_tensor",)),
    "all_to_all_single": (("input",), ("output",)),
    "barrier": ((), ()),
}
# One name for what two torch versions call differently.
CANONICAL = {
    "reduce_scatter_tensor": "reduce_scatter_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_gather_into_tensor": "all_gather_single",
    "_all_gather_base": "all_gather_single",
}
TRACE_BYTES = 1 << 18
_HEAD = struct.Struct("!I")


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


class Recorder:
    """What one rank did with collectives since `clear`. `events` are plain dicts, fit to cross to pytest."""

    def __init__(self, trace: Trace, root: str, withhold: bool, provide_futures: bool) -> None:
        self.trace = trace
        self.root = os.path.join(root, "")
        self.withhold = withhold
        self.provide_futures = provide_futures
        self.depth = 0
        self.events: list[dict[str, Any]] = []
        self.bypassed: list[str] = []

    def clear(self) -> None:
        self.events = []
        self.bypassed = []
        self.trace.clear()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Calls made inside are the gate's own or part of a call already noted."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def caller(self) -> str:
        """`file.py:12` of the innermost target frame, relative to the target; "" when called by the gate."""
        frame = sys._getframe(1)
        while frame is not None:
            name = frame.f_code.co_filename
            if name.startswith(self.root):
                return f"{name[len(self.root) :]}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def note(self, name: str, bound: dict[str, Any], outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Any:
        reads, writes = ([list(t.shape) for t in tensors] for tensors in (inputs, outputs))
        op = bound.get("op")
        reduction = str(op).rsplit(".", 1)[-1] if op is not None else "-"
        dtypes = sorted({str(t.dtype).removeprefix("torch.") for t in (*inputs, *outputs)})
        event = {
            "seq": len(self.events),
            "op": CANONICAL.get(name, name),
            "reduction": reduction,
            "dtype": ",".join(dtypes) or "-",
            "reads": reads,
            "writes": writes,
            "bytes_read": sum(t.numel() * t.element_size() for t in inputs),
            "bytes_written": sum(t.numel() * t.element_size() for t in outputs),
            "async": bool(bound.get("async_op")),
            "where": self.caller(),
            "waited": not bound.get("async_op"),
            "touched": "",
        }
        self.events.append(event)
        self.trace.write(f"{signature(event)}  {event['where']}")
        return event


def signature(event: dict[str, Any]) -> str:
    """What must agree across ranks for one collective."""
    shapes = f"{event['reads']} -> {event['writes']}" if event["reads"] or event["writes"] else ""
    return " ".join(part for part in (event["op"], event["reduction"], event["dtype"], shapes) if part)


def _tensors(bound: dict[str, Any], names: Iterable[str]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name in names:
        value = bound.get(name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.data.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.data.fill_(True)
    else:
        tensor.data.fill_(torch.iinfo(tensor.dtype).min)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


class WithheldWork:
    """Stands in for the Work of an asynchronous collective and hands its result over at the wait."""

    def __init__(
        self,
        work: Any,
        event: dict[str, Any],
        recorder: Recorder,
        outputs: list[tuple[torch.Tensor, torch.Tensor]],
        inputs: list[torch.Tensor],
    ) -> None:
        self._work = work
        self._event = event
        self._recorder = recorder
        self._outputs = outputs
        # As they are after the poison: nobody may write to either before the wait.
        self._watched = [(t, t.detach().clone()) for t in (*inputs, *(real for real, _ in outputs))]

    def _settle(self) -> None:
        if self._event["waited"]:
            return
        self._event["waited"] = True
        with self._recorder.quiet():
            for tensor, before in self._watched:
                if not _same_bits(tensor, before):
                    self._event["touched"] = f"a tensor of shape {list(tensor.shape)} changed between launch and wait"
            for real, scratch in self._outputs:
                real.data.copy_(scratch)
        self._watched = []

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._work.wait(*args, **kwargs)
        self._settle()
        return result

    def is_completed(self) -> bool:
        """A poll that says done is a wait: the caller may use the result from here on."""
        done = bool(self._work.is_completed())
        if done:
            self._work.wait()
            self._settle()
        return done

    def get_future(self) -> Any:
        if not self._recorder.provide_futures:
            self._work.get_future()  # raises what this backend raises where it has no future
        return WithheldFuture(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class WithheldFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future over a WithheldWork; `then` and `collect_all` keep the result withheld until they are waited on."""

    def __new__(cls, *_: Any, **__: Any) -> WithheldFuture:
        future: WithheldFuture = super().__new__(cls)
        return future

    def __init__(self, *works: Any, finish: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._works = works
        self._finish = finish
        self._value: Any = None
        self._settled = False

    def wait(self) -> Any:
        if not self._settled:
            for work in self._works:
                work.wait()
            self._settled = True
            self._value = self._finish() if self._finish else self._results()
        return self._value

    def _results(self) -> Any:
        work = self._works[0]
        return [real for real, _ in work._outputs] if isinstance(work, WithheldWork) else list(self._works)

    def value(self) -> Any:
        return self.wait()

    def done(self) -> bool:
        return all(w.is_completed() if hasattr(w, "is_completed") else w.done() for w in self._works)

    def then(self, callback: Callable[[Any], Any]) -> WithheldFuture:
        return WithheldFuture(self, finish=lambda: callback(self))

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        finish = self._finish

        def both() -> Any:
            value = finish() if finish else self._results()
            self._settled, self._value = True, value
            callback(self)
            return value

        self._finish = both


def _collect_all(original: Callable[..., Any], futures: list[Any]) -> Any:
    if any(isinstance(future, WithheldFuture) for future in futures):
        return WithheldFuture(*futures)
    return original(futures)


def _wait_all(original: Callable[..., Any], futures: list[Any]) -> Any:
    if any(isinstance(future, WithheldFuture) for future in futures):
        return [future.wait() for future in futures]
    return original(futures)


def _wrap(name: str, original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    parameters = inspect.signature(original)
    reads, writes = OPERATIONS[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if recorder.depth:
            return original(*args, **kwargs)
        call = parameters.bind(*args, **kwargs)
        call.apply_defaults()
        bound = call.arguments
        inputs, outputs = _tensors(bound, reads), _tensors(bound, writes)
        event = recorder.note(name, bound, outputs, inputs)
        with recorder.quiet():
            if not (recorder.withhold and event["async"] and outputs):
                return original(*args, **kwargs)
            return _launch_withheld(original, bound, reads, writes, event, recorder)

    return wrapper


def _launch_withheld(
    original: Callable[..., Any],
    bound: dict[str, Any],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    event: dict[str, Any],
    recorder: Recorder,
) -> Any:
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copies(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            scratch = value.detach().clone()
            pairs.append((value, scratch))
            return scratch
        if isinstance(value, (list, tuple)):
            return [copies(item) for item in value]
        return value

    call = dict(bound)
    for name in dict.fromkeys((*reads, *writes)):
        call[name] = copies(bound.get(name))
    work = original(**call)
    if work is None:
        return None  # this rank is not in the group
    outputs, inputs = _tensors(bound, writes), _tensors(bound, reads)
    spared = [(t, t.detach().clone()) for t in inputs] if event["op"].startswith("all_gather") else []
    for real in outputs:
        _poison(real)
    for real, own in spared:
        if any(_overlap(real, output) for output in outputs):
            real.data.copy_(own)
    written = [(real, scratch) for real, scratch in pairs if any(real is t for t in outputs)]
    return WithheldWork(work, event, recorder, written, [t for t in inputs if not any(t is o for o in outputs)])


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    size = tensor.element_size()
    reach = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    last = sum(reach) if tensor.numel() else -1
    start = tensor.storage_offset() * size
    return tensor.untyped_storage().data_ptr(), start, start + (last + 1) * size


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (store_a, start_a, end_a), (store_b, start_b, end_b) = _span(a), _span(b)
    return store_a == store_b and start_a < end_b and start_b < end_a


class _Bypass(TorchDispatchMode):
    """Notes collectives that reach c10d without passing one of our wrappers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and not self.recorder.depth:
            name = str(func)
            if not name.startswith("_c10d_functional.wait_tensor"):
                self.recorder.bypassed.append(f"{name}  {self.recorder.caller()}")
        return func(*args, **(kwargs or {}))


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
    if recorder.withhold:
        for name, replacement in (("collect_all", _collect_all), ("wait_all", _wait_all)):
            setattr(torch.futures, name, functools.partial(replacement, getattr(torch.futures, name)))
    _Bypass(recorder).__enter__()
