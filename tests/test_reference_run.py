"""What a newcomer runs first: the reference trains a tiny model, without a network and from nothing."""

import os
import re
import subprocess
import sys

from tests.faults.edit import ROOT


def test_tiny_train(tmp_path):
    """The README's line that trains must train, also after a change that no requirement on forks looks at."""
    env = os.environ | {"NANOCHAT_BASE_DIR": str(tmp_path), "NANOCHAT_DTYPE": "float32", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "nanochat.scripts.tiny_train"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [float(loss) for loss in re.findall(r"loss:? (\d+\.\d+)", done.stdout)]
    assert losses[-1] < losses[0] / 2, done.stdout[-2000:]
    assert list(tmp_path.glob("tiny/base_checkpoints/*/model_*.pt"))
