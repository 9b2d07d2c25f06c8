"""Worlds of ranks: what they return, and how every way of failing is seen, named and cleaned up."""

import os
import subprocess
import sys
import time

import psutil
import pytest

from nanochat_gate import Violation, world
from nanochat_gate.server import ROOT
from tests import rank_functions as fn


def gone(pids, seconds=10):
    """Whether none of the processes is left after at most that long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE for p in pids):
            return True
        time.sleep(0.05)
    return False


def test_every_rank_answers_in_order(ranks):
    """Results credited to the wrong rank would pass a fork that is right on rank 0 only."""
    got = ranks(fn.who, size=3)
    assert [(one["rank"], one["size"], one["group"]) for one in got] == [(0, 3, True), (1, 3, True), (2, 3, True)]
    assert len({one["pid"] for one in got}) == 3
    assert os.getpid() not in {one["pid"] for one in got}


def test_ranks_really_talk(ranks):
    """A world whose collectives do nothing would find every fork correct."""
    assert [one.tolist() for one in ranks(fn.total, size=3)] == [[6.0] * 3] * 3


def test_seeds_differ_between_ranks_and_calls(ranks):
    """Forks of one process share seeds; weights that are equal only by that would look synchronised."""
    first, second = ranks(fn.draws, size=2), ranks(fn.draws, size=2)
    for position in range(3):
        assert len({str(one[position]) for one in (*first, *second)}) == 4


def test_world_is_reused_until_something_changes(ranks):
    """A world that a test has bent would bend the verdict of the next one."""
    before = ranks(fn.who, size=2)[0]["pid"]
    assert ranks(fn.who, size=2)[0]["pid"] == before
    for what in ("environment", "dtype", "patch", "folder", "threads", "target"):
        before = ranks(fn.who, size=2)[0]["pid"]
        ranks(fn.change, what, size=2)
        after = ranks(fn.who, size=2)[0]["pid"]
        assert after != before, what


def test_fresh_world_serves_one_call(ranks):
    """What a test patches in a fresh world must not outlive it."""
    first, second = (ranks(fn.who, size=1, fresh=True)[0]["pid"] for _ in range(2))
    assert first != second
    assert ranks(fn.who, size=1)[0]["pid"] != second


def test_exception_names_the_rank_and_line(ranks):
    """A failure without its rank and line costs its reader an hour."""
    with pytest.raises(Violation) as caught:
        ranks(fn.raise_on, 1, size=3)
    assert "rank 1 of 3: ValueError: this rank objects" in caught.value.actual
    assert "rank_functions.py" in caught.value.detail
    assert "the other ranks" in caught.value.detail
    assert any(line.startswith("torchrun --nproc-per-node=3") for line in caught.value.repro)


@pytest.mark.parametrize(
    ("how", "words"),
    [("exit 0", "exit code 0"), ("exit 3", "exit code 3"), ("SIGKILL", "SIGKILL"), ("SIGSEGV", "SIGSEGV")],
)
def test_dead_rank_is_named(ranks, how, words):
    """torch's own harness passes a test whose rank 1 segfaults."""
    with pytest.raises(Violation) as caught:
        ranks(fn.end_on, 1, how, size=2)
    assert caught.value.actual.startswith("rank 1 of 2:")
    assert words in caught.value.actual


def test_hang_shows_stack_and_collective(ranks, monkeypatch):
    """A time-out that does not say where every rank was has to be reproduced by hand."""
    monkeypatch.setattr(world, "STALL", 2.0)
    with pytest.raises(Violation) as caught:
        ranks(fn.hang_on, 0, size=2)
    assert "all_reduce SUM float32 [[5]] -> [[5]]" in caught.value.actual + caught.value.detail
    assert "hang_on" in caught.value.detail
    assert "rank 1 was here" in caught.value.detail


def test_mismatch_is_reported_as_such(ranks, monkeypatch):
    """Ranks in different collectives look like a slow network unless somebody compares them."""
    monkeypatch.setattr(world, "STALL", 2.0)
    with pytest.raises(Violation) as caught:
        ranks(fn.mismatch, size=2)
    assert caught.value.expected == "the same collective on every rank at call 1"
    assert "rank 1: barrier" in caught.value.actual


def test_sleeping_rank_is_no_hang_yet(ranks, monkeypatch):
    """A rank that is merely late must not turn a good fork red."""
    monkeypatch.setattr(world, "STALL", 5.0)
    assert ranks(fn.slow, 1.0, size=2) == [0, 1]


def test_children_of_ranks_are_killed(ranks, gate):
    """torchrun's workers move to sessions of their own; left behind they eat the machine's cores."""
    children = ranks(fn.leave_child, size=2, fresh=True)
    assert all(psutil.pid_exists(pid) for pid in children)
    gate.pool.close()
    assert gone(children)


def test_children_started_while_ranks_are_killed_are_killed(ranks, gate, tmp_path):
    """A process table read once misses what a dying rank starts after that."""
    ranks(fn.start_children_for_ever, str(tmp_path / "pids"), size=2, fresh=True)
    while not (tmp_path / "pids").exists():
        time.sleep(0.01)
    gate.pool.close()
    time.sleep(0.5)  # what a child's parent has not written down yet
    assert gone([int(word) for word in (tmp_path / "pids").read_text().split()])


def test_nothing_survives_a_killed_pytest(tmp_path):
    """A CI job that is cancelled must not leave ranks behind."""
    code = f"""
import json, os, pathlib, sys
sys.path.insert(0, {str(ROOT)!r})
from nanochat_gate import environment, target, world
server = world.Server(pathlib.Path({str(tmp_path)!r}))
spec = world.Spec(json.dumps(target.find({str(ROOT)!r}).for_ranks()), 2)
one = world.World(server, spec, environment.base())
print(server._process.pid, *one.pids, flush=True)
os._exit(1)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    pids = [int(word) for word in out.stdout.split()]
    assert len(pids) == 3, out.stderr
    assert gone(pids)


def test_environment_is_scrubbed(ranks, gate, monkeypatch):
    """A fork's test run must not see the secrets of the machine it is gated on."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    got = ranks(fn.environment, size=2)
    assert not [name for name in got[0] if "TOKEN" in name or "KEY" in name]
    assert got[1]["RANK"] == "1"
    assert got[1]["HOME"] != os.environ.get("HOME")
    assert not any(str(ROOT) == path for path in ranks(fn.paths, size=1, torchrun=False, group=None)[0][1:])


def test_large_results_cross_whole(ranks):
    """A result cut at a pipe's buffer would compare equal to another cut one."""
    got = ranks(fn.large, 2_000_000, size=2)
    assert all(one.numel() == 2_000_000 and int(one[-1]) == 1_999_999 for one in got)
