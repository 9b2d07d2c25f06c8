"""Observed and withheld collectives: what a target does wrong with a handle is seen, and what it does right is not.

Rank functions return what they found wrong, or plain data that the test judges.
"""

import json
import threading

import pytest
import torch
import torch.distributed as dist

from nanochat_gate import withheld, world

SIZE = 2


def launchers(rank):
    """name -> (launch, what is read, what is written, what must be in it after the wait); new tensors at each call."""
    size, mine = rank.size, float(rank.rank + 1)
    total = size * (size + 1) / 2
    each = torch.arange(1.0, size + 1)
    t, whole = torch.full((3,), mine), torch.full((3 * size,), mine)
    parts, out, outs = [torch.full((3,), mine) for _ in range(size)], torch.zeros(3), torch.zeros(3 * size)
    lists = [torch.zeros(3) for _ in range(size)]
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    summed, gathered = torch.full((3,), total), each.repeat_interleave(3)
    return {
        "all_reduce": (lambda: dist.all_reduce(t, async_op=True), [], [t], summed),
        "reduce_scatter": (lambda: dist.reduce_scatter(out, parts, async_op=True), parts, [out], summed),
        "reduce_scatter_single": (lambda: scatter(out, whole, async_op=True), [whole], [out], summed),
        "all_gather": (lambda: dist.all_gather(lists, t, async_op=True), [t], lists, gathered),
        "all_gather_single": (lambda: gather(outs, t, async_op=True), [t], [outs], gathered),
        "all_to_all_single": (lambda: dist.all_to_all_single(outs, whole, async_op=True), [whole], [outs], gathered),
    }


def early(rank):
    """Uses results before the wait, and after it."""
    wrong = []
    for name in launchers(rank):
        launch, _, outputs, want = launchers(rank)[name]
        work = launch()
        before = torch.cat(outputs).isnan()
        work.wait()
        after = torch.cat(outputs)
        if not before.all() or not torch.equal(after, want):
            wrong.append(f"{name}: {before.tolist()} NaN before the wait, {after.tolist()} after it")
    return wrong + [f"{e['op']}: {e}" for e in rank.recorder.events if not e["waited"] or e["touched"]]


def test_results_come_at_the_wait(ranks):
    assert ranks(early, size=SIZE, lane="withheld") == [[]] * SIZE


def dropped(rank):
    """Waits for every second handle only."""
    for name in launchers(rank):
        works = [launchers(rank)[name][0]() for _ in range(2)]
        works[1].wait()
    return [(event["op"], event["waited"]) for event in rank.recorder.events]


def test_a_dropped_wait_is_seen(ranks):
    for events in ranks(dropped, size=SIZE, lane="withheld"):
        assert len(events) == 12
        assert [waited for _, waited in events] == [False, True] * 6


def written(rank):
    """Writes to each input, then to each output, of each kind of collective in flight."""
    for side in (1, 2):
        for name in launchers(rank):
            given = launchers(rank)[name]
            work = given[0]()
            for tensor in given[side]:
                tensor[0] = 5.0
            work.wait()
    return [(event["op"], event["touched"]) for event in rank.recorder.events]


def test_a_write_in_flight_is_seen(ranks):
    for events in ranks(written, size=SIZE, lane="withheld"):
        assert [op for op, touched in events[:6] if not touched] == ["all_reduce"]  # which has nothing it only reads
        assert all(touched.startswith("an input of shape") for _, touched in events[1:6])
        assert all(touched.startswith("the result's memory of shape") for _, touched in events[6:])


def spared(rank):
    """Reads what may be read: its own slice of a gather's output, a broadcast's source."""
    wrong, mine = [], float(rank.rank + 1)
    own = slice(2 * rank.rank, 2 * rank.rank + 2)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    whole = torch.zeros(2 * rank.size)
    whole[own] = mine
    work = gather(whole, whole[own], async_op=True)
    if whole[own].tolist() != [mine] * 2 or int(whole.isnan().sum()) != 2 * (rank.size - 1):
        wrong.append(f"gather in place: {whole.tolist()}")
    work.wait()
    listed = [torch.full((2,), mine) if r == rank.rank else torch.zeros(2) for r in range(rank.size)]
    work = dist.all_gather(listed, listed[rank.rank], async_op=True)
    if [t.isnan().any().item() for t in listed] != [r != rank.rank for r in range(rank.size)]:
        wrong.append(f"gather of a member of the list: {listed}")
    work.wait()
    t = torch.full((2,), mine)
    work = dist.broadcast(t, src=1, async_op=True)
    if t.isnan().any() == (rank.rank == 1):
        wrong.append(f"broadcast: {t.tolist()}")
    work.wait()
    if whole.tolist() != torch.arange(1.0, rank.size + 1).repeat_interleave(2).tolist() or t.tolist() != [2.0, 2.0]:
        wrong.append(f"after the waits: {whole.tolist()} {t.tolist()}")
    return wrong + [f"{e['op']}: {e['touched']}" for e in rank.recorder.events if e["touched"]]


def test_what_may_be_read_is_spared(ranks):
    assert ranks(spared, size=SIZE, lane="withheld") == [[]] * SIZE


def memory(rank):
    """Integers, empty and strided tensors; tensors that are given other memory, or lose it, in flight."""
    wrong = []
    counts = torch.tensor([1, 2])
    work = dist.all_reduce(counts, async_op=True)
    if counts.tolist() != [torch.iinfo(torch.int64).min] * 2:
        wrong.append(f"integers: {counts}")
    work.wait()
    empty = torch.zeros(0)
    dist.all_reduce(empty, async_op=True).wait()
    swapped = torch.ones(2)
    there = swapped.detach()
    work = dist.all_reduce(swapped, async_op=True)
    swapped.data = torch.full((2,), 9.0)
    work.wait()
    if there.tolist() != [rank.size] * 2 or swapped.tolist() != [9.0] * 2:
        wrong.append(f"the result follows the tensor, not the memory: {there} {swapped}")
    freed, out = torch.ones(2 * rank.size), torch.zeros(2)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = scatter(out, freed, async_op=True)
    freed.untyped_storage().resize_(0)
    work.wait()
    if "freed" not in rank.recorder.events[-1]["touched"] or out.tolist() != [rank.size] * 2:
        wrong.append(f"freed: {rank.recorder.events[-1]}")
    return wrong


def test_memory(ranks):
    assert ranks(memory, size=SIZE, lane="withheld") == [[]] * SIZE


def strided(rank):
    """A tensor with gaps, which a backend may refuse, take, or take for one without."""
    t = (torch.arange(12.0).view(4, 3) * (rank.rank + 1))[:, 1]
    try:
        dist.all_reduce(t, async_op=True).wait()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return t.tolist()


def test_the_backend_gets_tensors_of_the_same_strides(ranks):
    assert ranks(strided, size=SIZE, lane="withheld") == ranks(strided, size=SIZE)


def polled(rank):
    """Polls until done instead of waiting; other methods that wait for nothing on a CPU."""
    t = torch.ones(2)
    work = dist.all_reduce(t, async_op=True)
    while not work.is_completed():
        pass
    u = torch.ones(2)
    other = dist.all_reduce(u, async_op=True)
    dist.barrier()
    other.synchronize()
    first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
    while not first.done():
        pass
    waited = [event["waited"] for event in rank.recorder.events]
    barrier = dist.barrier(async_op=True)
    barrier.wait()
    return t.tolist(), u.isnan().tolist(), waited, rank.recorder.events[-1]["waited"], isinstance(work, dist.Work)


def test_a_poll_that_says_done_is_a_wait(ranks):
    want = ([2.0, 2.0], [True, True], [True, False, True, True], True, True)
    assert ranks(polled, size=SIZE, lane="withheld") == [want] * SIZE


def futures(rank):
    wrong, seen = [], []

    def start():
        t = torch.ones(2)
        return t, dist.all_reduce(t, async_op=True)

    def check(name, ok):
        if not ok:
            wrong.append(name)

    t, work = start()
    check("wait of a future gives the tensors", work.get_future().wait()[0] is t and t.tolist() == [2.0, 2.0])
    t, work = start()
    chained = work.get_future().then(lambda future: future.value()[0] * 10)
    check("then runs nothing before the wait", t.isnan().all())
    check("then has its value", chained.wait().tolist() == [20.0, 20.0] and t.tolist() == [2.0, 2.0])
    t, work = start()
    future = work.get_future()
    future.then(lambda f: seen.append(f.value()[0].tolist()))
    future.add_done_callback(lambda f: seen.append("done"))
    check("callbacks run when the handle is waited for", (work.wait(), seen)[1] == [[2.0, 2.0], "done"])
    future.then(lambda _: seen.append("late"))
    check("a callback added late runs at once", seen[-1] == "late")
    pairs = [start() for _ in range(3)]
    both = torch.futures.collect_all([work.get_future() for _, work in pairs[:2]])
    check("collect_all waits for nothing by itself", all(t.isnan().all() for t, _ in pairs))
    check("collect_all gives futures", [f.value()[0].tolist() for f in both.wait()] == [[2.0, 2.0]] * 2)
    check("collect_all waits for its own only", pairs[2][0].isnan().all())
    torch.futures.wait_all([pairs[2][1].get_future()])
    check("wait_all waits", pairs[2][0].tolist() == [2.0, 2.0])
    t, work = start()
    try:
        work.get_future().value()
        check("value() without a wait is refused", False)
    except RuntimeError:
        work.wait()
    t, work = start()
    failing = work.get_future().then(lambda _: 1 / 0)
    try:
        failing.wait()
        check("what a callback raises comes out at the wait", False)
    except ZeroDivisionError:
        pass
    count = len(rank.recorder.events)
    t, work = start()
    nested = work.get_future().then(lambda f: dist.all_reduce(f.value()[0], async_op=True).wait())
    nested.wait()
    check("a collective of a callback is observed", len(rank.recorder.events) == count + 2 and t.tolist() == [4.0, 4.0])
    return wrong + [str(event) for event in rank.recorder.events if not event["waited"] or event["touched"]]


def test_futures(ranks):
    assert ranks(futures, size=SIZE, lane="withheld") == [[]] * SIZE


def backend_future(rank):
    out, whole = torch.zeros(2), torch.ones(2 * rank.size)
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    work = scatter(out, whole, async_op=True)
    try:
        work.get_future().wait()
    except RuntimeError as error:
        work.wait()
        return str(error)
    return ""


def test_futures_are_provided_only_where_asked_for(ranks, gate):
    native = ranks(backend_future, size=SIZE, lane="withheld-native")
    assert native == ranks(backend_future, size=SIZE)
    assert "getFuture" in native[0], "Gloo has this future by now"
    replies = world_of(gate, "withheld").call(__file__, "backend_future", [], "backend_future")
    assert [reply.value for reply in replies] == [""] * SIZE


def world_of(gate, lane):
    return gate.pool.take(
        world.Spec(json.dumps(gate.target.for_ranks()), SIZE, group="provided", lane=lane), fresh=True
    )


def bypass(rank):
    """kind -> what was noted of it."""
    import torch.distributed._functional_collectives as functional

    world, t, noted = dist.group.WORLD, torch.ones(2), {}
    ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    def threaded():
        thread = threading.Thread(target=lambda: world.allreduce([t]).wait())
        thread.start()
        thread.join()

    def coalesced():
        with dist._coalescing_manager():
            dist.all_reduce(t)

    for name, call in {
        "method": lambda: world.allreduce([t]).wait(),
        "backend": lambda: world._get_backend(torch.device("cpu")).allreduce([t]).wait(),
        "functional": lambda: functional.all_reduce(t, "sum", world) + 1,
        "ddp": lambda: ddp(torch.ones(1, 2)).sum().backward(),
        "thread": threaded,
        "coalesced": coalesced,
        "send": lambda: dist.send(t, 1) if rank.rank == 0 else dist.recv(t, 0),
        "wrapped": lambda: dist.all_reduce(t),
        "object": lambda: dist.all_gather_object([None] * rank.size, "it"),
        "barrier": dist.barrier,
    }.items():
        rank.recorder.clear()
        call()
        noted[name] = list(rank.recorder.bypassed)
    return noted


@pytest.mark.parametrize("lane", ["plain", "withheld"])
def test_what_bypasses_the_wrappers_is_noted(ranks, lane):
    for noted in ranks(bypass, size=SIZE, lane=lane, fresh=True):
        assert {name for name, calls in noted.items() if not calls} == {"wrapped", "object", "barrier"}, noted


def prompt(rank):
    t, u, v = torch.ones(2), torch.ones(2), torch.ones(2)
    with rank.recorder.prompt(but=1):
        work = dist.all_reduce(t, async_op=True)
        other = dist.all_reduce(u, async_op=True)
        last = dist.all_reduce(v, async_op=True)
    seen = t.tolist(), u.isnan().tolist(), [event["waited"] for event in rank.recorder.events]
    for handle in (work, other, last):
        handle.get_future().wait()
    return *seen, [event["waited"] for event in rank.recorder.events]


def test_prompt_results_are_there_at_the_launch(ranks):
    want = ([2.0, 2.0], [True, True], [False] * 3, [True] * 3)
    assert ranks(prompt, size=SIZE, lane="withheld") == [want] * SIZE


def test_a_copy_has_the_strides_of_its_original():
    """A tensor that shares elements with itself is no obstacle."""
    for tensor in (torch.arange(12.0).view(3, 4).t(), torch.ones(2, 1).expand(2, 3), torch.arange(9.0)[1::2]):
        copied = withheld._copy(tensor)
        assert copied.stride() == tensor.stride()
        assert torch.equal(copied, tensor)
        assert copied.data_ptr() != tensor.data_ptr()
