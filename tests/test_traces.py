"""Traces of collectives: kept by group, outliving their rank, and compared between ranks.

Rank functions return what they found wrong, or plain data that the test judges.
"""

import json
import os

import pytest
import torch
import torch.distributed as dist

from nanochat_gate import Violation, world
from nanochat_gate.judge import first_mismatch

SIZE = 2


def grouped(rank):
    """Collectives of a group of two among three ranks."""
    pair = dist.new_group([0, 2])
    rank.recorder.clear()
    t = torch.ones(2)
    work = dist.all_reduce(t, group=pair, async_op=True)
    if work is not None:
        work.wait()
    dist.barrier()
    return [(event["op"], event["group"]) for event in rank.recorder.events], t.tolist()


def test_groups(ranks):
    inside = ([("all_reduce", "0,2"), ("barrier", "")], [2.0, 2.0])
    outside = ([("barrier", "")], [1.0, 1.0])
    assert ranks(grouped, size=3, lane="withheld", fresh=True) == [inside, outside, inside]


def test_mismatch_is_judged_within_groups():
    pair, other = "all_reduce SUM float32 [[2]] -> [[2]] among 0,2  a.py:1", "barrier  a.py:2"
    assert first_mismatch([[pair, other], [other], [other, pair]]) is None
    expected, actual, where = first_mismatch([[pair], [], [pair.replace("[2]", "[3]").replace(":1", ":7")]])
    assert "among ranks 0,2" in expected
    assert "rank 0" in actual
    assert "rank 2" in actual
    assert where == "a.py:7"


def ends(rank):
    dist.all_reduce(torch.ones(2))
    if rank.rank == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(5))


def test_the_trace_outlives_its_rank(gate):
    spec = world.Spec(json.dumps(gate.target.for_ranks()), SIZE, group="provided")
    made = gate.pool.take(spec, fresh=True)
    replies = made.call(__file__, "ends", [], "ends")
    assert not replies[1].ok
    assert "exit code 3" in replies[1].error["text"]
    assert [call.split("  ")[0] for call in made.trace(1)] == ["all_reduce SUM float32 [[2]] -> [[2]]"]


def differ(rank, how):
    t = torch.ones(4)
    if rank.rank == 0:
        dist.all_reduce(t)
    elif how == "shape":
        dist.all_reduce(torch.ones(5))
    elif how == "dtype":
        dist.all_reduce(torch.ones(4, dtype=torch.int32))
    elif how == "operation":
        dist.broadcast(t, 0)
    dist.all_reduce(t)
    raise RuntimeError("at last")  # what Gloo lets pass is judged by the traces of a call that fails for any reason


@pytest.mark.parametrize("how", ["shape", "dtype", "operation"])
def test_a_mismatch_is_named(ranks, how, monkeypatch):
    monkeypatch.setattr(world, "STALL", 1.0)
    with pytest.raises(Violation) as caught:
        ranks(differ, how, size=SIZE, fresh=True)
    assert caught.value.expected == "the same collective on every rank at call 0"
    assert "rank 0: all_reduce SUM float32 [[4]] -> [[4]], rank 1: " in caught.value.actual
