"""Results of asynchronous collectives that reach the target at its wait, never before.

`launch` runs a collective on scratch copies of its tensors, fills the real output with NaN (sparing what the caller
may go on reading: its own slice of a gather, the source of a broadcast) and returns a `WithheldWork` in place of the
handle. Its wait copies the result in. Inputs and outputs are compared with what they were at the launch, so a write to
either in between is seen. `launch_prompt` is the opposite: the result is there at once, whatever the target waits for.
What the two leave behind differs only in a target that uses a result before its wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from nanochat_gate.observe import Recorder

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
# Where an input may lie inside the output, as the part of it that this rank knows already.
KEEPS_OWN = ("all_gather", "all_gather_single", "gather", "scatter")


def tensors(bound: dict[str, Any], names: Iterable[str]) -> list[torch.Tensor]:
    """The tensors among the named arguments, lists of them included."""
    found: list[torch.Tensor] = []
    for name in names:
        value = bound.get(name)
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, torch.Tensor)]
    return found


def launch(
    original: Callable[..., Any],
    bound: dict[str, Any],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    event: dict[str, Any],
    recorder: Recorder,
) -> WithheldWork:
    """Start a collective on copies and withhold its result. `bound` holds the arguments of the call by name."""
    inputs, outputs = tensors(bound, reads), tensors(bound, writes)
    written: Pairs = []

    def copies(value: Any, kept: Pairs) -> Any:
        if isinstance(value, torch.Tensor):
            # .data is the memory the tensor has now: where the result goes even if the target gives it other memory.
            kept.append((value.data, _copy(value)))
            return kept[-1][1]
        return [copies(item, kept) for item in value] if isinstance(value, (list, tuple)) else value

    call = dict(bound)
    for name in reads:
        if name not in writes:
            call[name] = copies(bound.get(name), [])
    for name in writes:
        call[name] = copies(bound.get(name), written)
    work = original(**call)
    if not (event["op"] == "broadcast" and _is_source(bound)):
        own = [(t.data, t.detach().clone()) for t in inputs] if event["op"] in KEEPS_OWN else []
        for real, _ in written:
            _poison(real)
        for real, before in own:
            if any(_overlap(real, output) for output, _ in written):
                real.copy_(before)
    only_read = [t.data for t in inputs if not any(t is output for output in outputs)]
    return WithheldWork(work, event, recorder, outputs, written, only_read)


def launch_prompt(
    original: Callable[..., Any], bound: dict[str, Any], outputs: list[torch.Tensor], event: Any, recorder: Recorder
) -> WithheldWork:
    """Start a collective on the target's own tensors and finish it before the target gets the handle."""
    work = original(**bound)
    work.wait()
    return WithheldWork(work, event, recorder, outputs, [], [])


def _is_source(bound: dict[str, Any]) -> bool:
    if bound.get("group_src") is not None:
        return bool(dist.get_rank(bound.get("group")) == bound["group_src"])
    return bool(dist.get_rank() == bound.get("src"))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides of the original, so that a backend which refuses those refuses the copy too."""
    if tensor.is_contiguous():
        return tensor.detach().clone()
    start, end = (place // tensor.element_size() for place in _span(tensor)[1:])
    flat = tensor.detach().as_strided((end - start,), (1,), start).clone()
    return flat.as_strided(tensor.shape, tensor.stride(), 0)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min or limits.max)


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """(address of the storage, first byte in it, the byte after the last)."""
    size = tensor.element_size()
    reach = [(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    last = sum(reach) if tensor.numel() else -1
    start = tensor.storage_offset() * size
    return tensor.untyped_storage().data_ptr(), int(start), int(start + (last + 1) * size)


def layout(tensor: torch.Tensor) -> str:
    """ "" when contiguous, "transposed" when dense in another order, "gaps" when memory of others lies between."""
    if tensor.is_contiguous():
        return ""
    _, start, end = _span(tensor)
    return "transposed" if end - start == tensor.numel() * tensor.element_size() else "gaps"


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    (store_a, start_a, end_a), (store_b, start_b, end_b) = _span(a), _span(b)
    return store_a == store_b and start_a < end_b and start_b < end_a


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def _alive(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() >= _span(tensor)[2]


class WithheldWork(dist.Work):
    """Stands in for the Work of an asynchronous collective and hands its result over at the wait."""

    def __init__(
        self,
        work: Any,
        event: dict[str, Any],
        recorder: Recorder,
        outputs: list[torch.Tensor],
        written: Pairs,
        only_read: list[torch.Tensor],
    ) -> None:
        super().__init__()
        self._work = work
        self._event = event
        self._recorder = recorder
        self.outputs = outputs
        self._written = written
        # As they are after the poison: nobody may write to either before the wait.
        self._watched = [("an input", t, t.clone()) for t in only_read]
        self._watched += [("the result's memory", real, real.clone()) for real, _ in written]
        self.cuda = any(t.is_cuda for t in (*outputs, *only_read))
        self._followers: list[WithheldFuture] = []
        self.settled = False

    def settle(self) -> None:
        """The target has waited: check what it left alone, hand over the result, run what waits for it."""
        if self.settled:
            return
        self.settled = self._event["waited"] = True
        with self._recorder.quiet(), torch.no_grad():
            for what, tensor, before in self._watched:
                shape = f"of shape {list(tensor.shape)}"
                if not _alive(tensor):
                    self._event["touched"] = f"{what} {shape} was freed between launch and wait"
                elif not self._event["touched"] and not _same_bits(tensor, before):
                    self._event["touched"] = f"{what} {shape} was written to between launch and wait"
            for real, scratch in self._written:
                if _alive(real):
                    real.copy_(scratch)
        self._watched, self._written = [], []
        for future in self._followers:
            future.hear()

    def follow(self, future: WithheldFuture) -> None:
        self._followers.append(future)
        if self.settled:
            future.hear()

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        done = bool(self._work.wait(*args, **kwargs))
        self.settle()
        return done

    def is_completed(self) -> bool:
        """A poll that says done is a wait: the caller may use the result from here on."""
        done = bool(self._work.is_completed())
        if done:
            self.wait()
        return done

    def synchronize(self) -> None:
        """Makes CUDA's current stream wait; on the CPU it waits for nothing, and so it does here."""
        self._work.synchronize()
        if self.cuda:
            self.settle()

    def block_current_stream(self) -> None:
        self._work.block_current_stream()
        if self.cuda:
            self.settle()

    def result(self) -> list[torch.Tensor]:
        self._work.result()  # raises where there is none yet
        return self.outputs

    def get_future(self) -> Any:
        if not self._recorder.provide_futures:
            self._work.get_future()  # raises what this backend raises where it has no future
        return WithheldFuture([self], lambda: self.outputs)


def _forwarded(name: str) -> Any:
    return lambda self, *args: getattr(self._work, name)(*args)


for _name in ("exception", "is_success", "source_rank", "_source_rank", "get_future_result", "_get_duration"):
    setattr(WithheldWork, _name, _forwarded(_name))


class WithheldFuture(torch.futures.Future):  # type: ignore[type-arg]
    """A future over withheld handles and other futures; what is chained to it runs once they have been waited for."""

    def __new__(cls, *_: Any) -> WithheldFuture:
        future: WithheldFuture = super().__new__(cls)
        return future

    def __init__(self, sources: list[Any], finish: Callable[[], Any]) -> None:
        super().__init__()
        self._sources = sources
        self._finish = finish
        self._value: Any = None
        self._error: Exception | None = None
        self._followers: list[WithheldFuture] = []
        self.settled = False
        self.cuda = any(getattr(source, "cuda", False) for source in sources)
        for source in sources:
            if isinstance(source, (WithheldWork, WithheldFuture)):
                source.follow(self)

    def follow(self, future: WithheldFuture) -> None:
        self._followers.append(future)
        if self.settled:
            future.hear()

    def hear(self) -> None:
        """A source may have been settled: when all are, take the value and pass it on."""
        ours = (WithheldWork, WithheldFuture)
        if self.settled or not all(s.settled if isinstance(s, ours) else s.done() for s in self._sources):
            return
        self.settled = True
        try:
            self._value = self._finish()
        except Exception as error:
            self._error = error
        for future in self._followers:
            future.hear()

    def wait(self) -> Any:
        for source in self._sources:
            source.wait()
        self.hear()
        return self.value()

    def value(self) -> Any:
        if not self.settled:
            raise RuntimeError("value() of a future that nobody has waited for: call wait() first")
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        """On the CPU a poll that says done is a wait; a future of NCCL's says done once it is launched, of no use."""
        if self.cuda:
            return True
        polled = [s.is_completed() if isinstance(s, dist.Work) else s.done() for s in self._sources if not self.settled]
        self.hear()
        return all(polled)

    def then(self, callback: Callable[[Any], Any]) -> WithheldFuture:
        return WithheldFuture([self], lambda: callback(self))

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.then(callback)


def collect_all(original: Callable[..., Any], futures: list[Any]) -> Any:
    if any(isinstance(future, WithheldFuture) for future in futures):
        return WithheldFuture(list(futures), lambda: list(futures))
    return original(futures)


def wait_all(original: Callable[..., Any], futures: list[Any]) -> Any:
    if any(isinstance(future, WithheldFuture) for future in futures):
        return [future.wait() for future in futures]
    return original(futures)
