"""The COL suite goes red: each wait of the reference's step dropped in turn, each launch's tensors written to, ...

Sabotage sits between the target and its handles, so it reaches each single collective, which edits of the reference's
source (tests/faults) cannot. What the ranks then report is put before the requirements themselves.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nanochat_gate import Unsupported, Violation, adapt, withheld
from suites.col import test_backend, test_waits, watch

SIZE = 2


class Deaf(dist.Work):
    """A handle whose wait is none."""

    def __init__(self, work):
        super().__init__()
        self.work = work

    def wait(self, *_):
        return True

    def get_future(self):
        return self

    def value(self):
        return self.work.outputs


def dropped(work, bound, reads):
    return Deaf(work)


def written(work, bound, reads):
    tensor = withheld.tensors(bound, reads)[0].data.view(-1)
    tensor[:1] = tensor[:1] + 1 if tensor[0].isfinite() else 1
    return work


@contextlib.contextmanager
def sabotage(number, how, blame=False):
    """Treat the handle of collective `number` as `how` says, in a model of two layers; blame: find out whose it was."""
    launch, blamed, layers = withheld.launch, watch._blamed, adapt.TINY["n_layer"]

    def launched(original, bound, reads, writes, event, recorder):
        work = launch(original, bound, reads, writes, event, recorder)
        return how(work, bound, reads) if event["seq"] == number else work

    withheld.launch, adapt.TINY["n_layer"] = launched, 2
    watch._blamed = blamed if blame else lambda *_: ""
    try:
        yield
    finally:
        withheld.launch, watch._blamed, adapt.TINY["n_layer"] = launch, blamed, layers


def each_in_turn(rank, how):
    """What `watched` reports for each collective of a step sabotaged, those of the step before it sound first."""
    with sabotage(-1, dropped):
        reports = [watch.watched(rank, 1)]
    for number in range(len(reports[0]["steps"][0])):
        rank.recorder.clear()
        with sabotage(number, globals()[how]):
            reports.append(watch.watched(rank, 1))
    return reports


def before(requirement, reports):
    """Run a requirement on reports instead of ranks; the Violation, or None."""
    stub = SimpleNamespace(gate=SimpleNamespace(shared=lambda name, run: {"reports": reports}))
    try:
        requirement(stub, len(reports), "gloo")
    except Violation as error:
        return error
    return None


@pytest.mark.parametrize(
    ("how", "must_see"),
    [("dropped", [test_waits.test_waited, test_waits.test_results]), ("written", [test_waits.test_left_alone])],
)
def test_each_collective_in_turn(ranks, how, must_see):
    sound, *sabotaged = zip(*ranks(each_in_turn, how, size=SIZE, lane="withheld", fresh=True), strict=True)
    assert len(sabotaged) > 12
    for requirement in (test_waits.test_waited, test_waits.test_results, test_waits.test_left_alone):
        assert before(requirement, sound) is None
    for number, reports in enumerate(sabotaged):
        event = reports[0]["steps"][0][number]
        for requirement in must_see:
            error = before(requirement, reports)
            assert error is not None, f"{requirement.__name__} lets {event} through"
            if requirement is not test_waits.test_results:
                assert error.where == event["where"] != ""


def peeked(work, bound, reads):
    """Takes in at the wait what the result held at the launch, as a sum that was formed too early would."""
    early, wait = work.outputs[0].sum() * 0, work.wait

    def late(*_):
        wait()
        with torch.no_grad():
            work.outputs[0].add_(early)

    work.wait = late
    return work


def peeking(rank, number):
    with sabotage(number, peeked, blame=True):
        return watch.watched(rank, 1)


def test_an_early_read_is_blamed_on_its_collective(ranks):
    reports = ranks(peeking, 3, size=SIZE, lane="withheld", fresh=True)
    error = before(test_waits.test_results, reports)
    assert error is not None
    assert "NaN" in error.actual
    assert error.where == reports[0]["steps"][0][3]["where"] != ""
    assert before(test_waits.test_waited, reports) is None


def event(**changed):
    made = {
        "seq": 0, "op": "all_reduce", "reduction": "AVG", "dtype": "float32", "reads": [[4]], "writes": [[4]],
        "layouts": [], "bytes_read": 16, "bytes_written": 16, "async": True, "where": "optim.py:1", "group": "",
        "waited": True, "touched": "",
    }  # fmt: skip
    return made | changed


def report(*events, **changed):
    return {
        "setup": [],
        "steps": [list(events)],
        "bypassed": [],
        "differs": "",
        "blamed": "",
        "bytes": [16, 1],
    } | changed


def test_a_missing_collective_is_seen():
    error = before(test_waits.test_order, [report(event(), event(where="optim.py:9")), report(event())])
    assert "rank 1 issues 1" in error.actual
    assert error.where == "optim.py:9"
    assert before(test_waits.test_order, [report(event()), report(event())]) is None


def test_another_order_is_seen():
    other = event(writes=[[5]], where="optim.py:9")
    error = before(test_waits.test_order, [report(event(), other), report(other, event())])
    assert "call 0" in error.expected
    assert error.where == "optim.py:9"


def test_a_group_of_some_ranks_is_compared_among_them():
    pair, all_three = event(group="0,2"), event(op="barrier", reads=[], writes=[])
    fine = [report(pair, all_three), report(all_three), report(all_three, pair)]
    assert before(test_waits.test_order, fine) is None
    fine[2] = report(all_three)
    assert "rank 2 issues 0" in before(test_waits.test_order, fine).actual


def test_bytes():
    """16 bytes all-reduced by 2 ranks: each sends 16, which is what ZeRO sends for them."""
    scalar = event(reads=[[]], writes=[[]], bytes_read=4, bytes_written=4)
    assert before(test_waits.test_bytes, [report(event(), scalar)] * 2) is None
    gather = event(op="all_gather_single", reads=[[2]], bytes_read=8, where="optim.py:9")
    error = before(test_waits.test_bytes, [report(event(), gather)] * 2)
    assert "24 bytes, 1.50 times as many" in error.actual


def test_what_is_not_observed_is_not_judged():
    for reports in ([report(event(), bypassed=["ProcessGroup.allreduce  optim.py:3"])] * 2, [report()] * 2):
        for requirement in (test_waits.test_results, test_waits.test_waited, test_waits.test_left_alone):
            with pytest.raises(Unsupported):
                before(requirement, reports)


def parameters(*shapes):
    return [torch.zeros(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("kind", "shapes", "elements"),
    [
        ("muon", [(4, 6)] * 4, 6 * 24),  # 4 matrices are dealt to 3 ranks as 6
        ("muon", [(4, 6)] * 3 + [(6, 6)], 3 * 24 + 3 * 36),
        ("adamw", [(6, 5)], 30),
        ("adamw", [(7, 5)], 45),  # 7 rows are dealt as 9
        ("adamw", [(2,), ()], 3),
    ],
)
def test_zero_bytes(kind, shapes, elements):
    optimizer = SimpleNamespace(param_groups=[{"params": parameters(*shapes), "kind": kind}])
    assert watch.zero_bytes([optimizer], 3) == 2 * elements * 4 * 2 / 3


def wrong_by_one(rank, function):
    """A rank function of test_backend where every collective leaves one element of its result one too large."""
    names = ["all_reduce", "reduce_scatter", "all_gather"]
    for name in (*names, *(test_backend.single(name).__name__ for name in names[1:])):
        original = getattr(dist, name)

        def lying(output, *args, original=original, **kwargs):
            work = original(output, *args, **kwargs)
            if work is not None:
                work.wait()
            last = output[-1] if isinstance(output, list) else output
            last[last.size(0) - 1 :] += 1
            return work

        setattr(dist, name, lying)
    return getattr(test_backend, function)(rank)


@pytest.mark.parametrize("function", ["reductions", "large", "strided", "in_place", "out_of_order"])
def test_a_backend_that_is_wrong_by_one_is_seen(ranks, function):
    for said in ranks(wrong_by_one, function, size=2, group="provided", fresh=True):
        if function == "strided":
            assert all("wrong" in said[case] for case in said if not case.startswith("broadcast"))
        else:
            assert len(said) >= (1 if function == "large" else 4)
