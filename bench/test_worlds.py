"""What the engine costs: a fresh world, a call on a live one, seeing a dead rank; torch's own harness for comparison.

Run `pytest bench/ --benchmark-save=NAME`. Read the ratios: absolute times of a shared machine say little.
"""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from nanochat_gate import Violation


def nothing(rank):
    return None


def add_up(rank):
    """The trivial test: one all_reduce whose sum every rank checks."""
    tensor = torch.ones(8) * (rank.rank + 1)
    dist.all_reduce(tensor)
    assert tensor.eq(rank.size * (rank.size + 1) / 2).all()


def end_on_one(rank):
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_fresh_world(benchmark, ranks, size):
    """Fork, rendezvous, process group, one all_reduce, result."""
    ranks(add_up, size=size)
    benchmark.pedantic(lambda: ranks(add_up, size=size, group="provided", fresh=True), rounds=20)


def test_live_world(benchmark, ranks):
    """What one more test costs on a world that stands."""
    ranks(add_up, size=2)
    benchmark.pedantic(lambda: ranks(add_up, size=2), rounds=100)


def test_dead_rank(benchmark, ranks):
    """From the call to the verdict that rank 1 was killed, a fresh world included."""

    def die():
        with pytest.raises(Violation, match="SIGKILL"):
            ranks(end_on_one, size=2, group="provided", fresh=True)

    benchmark.pedantic(die, rounds=5)


HARNESS = """
import torch, torch.distributed as dist
from torch.testing._internal.common_distributed import MultiProcessTestCase
from torch.testing._internal.common_utils import run_tests

class Trivial(MultiProcessTestCase):
    @property
    def world_size(self):
        return 2
    def setUp(self):
        super().setUp()
        self._spawn_processes()
    def body(self):
        store = dist.FileStore(self.file_name, 2)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=2)
        tensor = torch.ones(8) * (self.rank + 1)
        dist.all_reduce(tensor)
        assert tensor.eq(3).all()
        dist.destroy_process_group()
"""


def test_torch_multi_process_test_case(benchmark, tmp_path):
    """The same trivial test under torch's MultiProcessTestCase: the cost of one more test, of 1 and of 3 tests."""

    def suite(count):
        names = "".join(f"    def test_{i}(self):\n        self.body()\n" for i in range(count))
        file = tmp_path / f"harness{count}.py"
        file.write_text(textwrap.dedent(HARNESS) + names + "\nif __name__ == '__main__':\n    run_tests()\n")
        env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "PYTORCH_TESTING_DEVICE_ONLY_FOR": "cpu"}
        start = time.perf_counter()
        done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=env, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
        return time.perf_counter() - start

    pytest.importorskip("expecttest", reason="torch's test harness needs expecttest")
    benchmark.pedantic(lambda: suite(1), rounds=2)
    benchmark.extra_info["seconds_for_each_further_test"] = (suite(3) - suite(1)) / 2
