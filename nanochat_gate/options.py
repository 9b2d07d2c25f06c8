"""What the command line accepts, and one clear line (exit code 4) for what it does not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nanochat_gate import recording, target

BACKENDS = ("gloo", "nccl")
MAX_WORLD = 16


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("nanochat gate", "nanochat gate: which nanochat to judge, and how")
    group.addoption(
        "--nanochat",
        metavar="PATH",
        help="checkout to gate (default: $NANOCHAT_TARGET, else the reference in this repo)",
    )
    group.addoption(
        "--claim",
        metavar="DEVICES",
        help="devices the fork claims to train on, e.g. cpu,cuda: what breaks there is a failure "
        "(default: its [tool.nanochat-gate], else what its compute_init can start)",
    )
    group.addoption(
        "--backends",
        metavar="NAMES",
        help="process group backends to test, of gloo,nccl (default: gloo, and nccl where there are GPUs)",
    )
    group.addoption("--world-sizes", metavar="N,...", default="1,2,3,4", help="world sizes to test (default: 1,2,3,4)")
    group.addoption(
        "--require",
        metavar="NAME",
        action="append",
        default=[],
        help="fail instead of reporting NOT TESTED where this machine lacks NAME, e.g. nccl; may be repeated",
    )
    group.addoption(
        "--level",
        choices=("must", "should"),
        default="must",
        help="which requirements decide the verdict: must (default), or should, which adds those only unusual "
        "conditions meet",
    )
    group.addoption(
        "--pass-env",
        metavar="NAME",
        action="append",
        default=[],
        help="environment variable to hand to the ranks, which otherwise get a scrubbed environment; may be repeated",
    )
    group.addoption(
        "--gate-out", metavar="DIR", help="folder for verdict.jsonl, .md and .html (default: reports/out/gate)"
    )


def check(config: pytest.Config) -> dict[str, Any]:
    """The options as values; pytest.UsageError for what cannot be meant."""
    path, named = config.getoption("nanochat"), "--nanochat"
    if path is None and "NANOCHAT_TARGET" in os.environ:
        path, named = os.environ["NANOCHAT_TARGET"], "NANOCHAT_TARGET"
    if path is None:
        path = str(config.rootpath)
    if not path.strip():  # an unset variable in a CI script must not gate our reference in place of the fork
        raise pytest.UsageError(f"{named} is empty; give the path of a nanochat checkout, or leave it out")
    if not Path(path).is_absolute():
        path = str(config.invocation_params.dir / path)
    try:
        found = target.find(path)
        claim = config.getoption("claim")
        claims = None if claim is None else target.check_claims(_split(claim), "--claim")
        if claims == ():
            words = ", ".join(target.CLAIMS)
            raise target.TargetError(f"--claim: no device given; name what the fork claims ({words}), or leave it out")
    except target.TargetError as error:
        raise pytest.UsageError(str(error)) from None
    backends = _split(config.getoption("backends") or "")
    if config.getoption("backends") is not None and not backends:
        raise pytest.UsageError(f"--backends: no backend given; known are {', '.join(BACKENDS)}")
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise pytest.UsageError(f"--backends: unknown backend {', '.join(unknown)}; known are {', '.join(BACKENDS)}")
    if unknown := [name for name in config.getoption("require") if name not in BACKENDS]:
        raise pytest.UsageError(f"--require: unknown {', '.join(map(repr, unknown))}; known are {', '.join(BACKENDS)}")
    if wrong := [name for name in config.getoption("pass_env") if not name.isidentifier()]:
        raise pytest.UsageError(f"--pass-env: {wrong[0]!r} is no variable's name; give the name alone, and set it here")
    out = recording.out_dir(config)
    if blocking := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None):
        raise pytest.UsageError(f"--gate-out: {blocking} is a file; give a folder, which is made where it is missing")
    return {
        "target": found,
        "claims": claims,
        "backends": backends,
        "world_sizes": _sizes(config.getoption("world_sizes")),
    }


def _split(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in _split(text):
        if not part.isdecimal() or not 1 <= int(part) <= MAX_WORLD:
            raise pytest.UsageError(
                f"--world-sizes: {part!r} is no world size; give numbers of ranks from 1 to {MAX_WORLD}, e.g. 1,2,4"
            )
        sizes.append(int(part))
    if not sizes:
        raise pytest.UsageError("--world-sizes: no world size given; give numbers of ranks, e.g. 1,2,4")
    return tuple(sorted(sizes))
