"""The environment ranks get: enough to run Python and torch, nothing that is somebody's secret.

This prevents accidents (a fork that logs in to a hub, a token in a log), not attacks: a target is code that runs here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from nanochat_gate.server import THREADS

_KEEP = (
    "PATH",
    "LD_LIBRARY_PATH",
    "LANG",
    "LC_ALL",
    "TZ",
    "USER",
    "LOGNAME",
    "VIRTUAL_ENV",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "SYSTEMROOT",
)
# torch asks the name server for the name of 127.0.0.1 at every rendezvous; one that does not answer costs 5 s
# each time. Ranks meet on the loopback and need none: /etc/hosts is still read.
NO_NAME_SERVER = "attempts:0"
_SET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TORCHDYNAMO_DISABLE": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    # Gloo otherwise looks up the machine's own name, which many CI containers cannot resolve.
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    "RES_OPTIONS": NO_NAME_SERVER,
}


def base(pass_env: Iterable[str] = ()) -> dict[str, str]:
    """A scrubbed copy of this process's environment, plus the names the user asked to pass on."""
    kept = {name: os.environ[name] for name in _KEEP if name in os.environ}
    passed = {name: os.environ[name] for name in pass_env if name in os.environ}
    return kept | _SET | THREADS | passed
