"""Real torchrun: rank functions in processes that torch's own launcher starts, and lines that repeat a failure."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat_gate import judge, observe, wire
from nanochat_gate.requirement import Violation
from nanochat_gate.server import ROOT

if TYPE_CHECKING:
    from nanochat_gate.plugin import Gate
    from nanochat_gate.target import Target

LIMIT = 180.0  # s; importing torch on every rank is most of a run
REPLAY = ROOT / "nanochat_gate" / "replay.py"


def command(gate: Gate, argv: Sequence[str], folder: Path, env: dict[str, str], limit: float) -> tuple[int | None, str]:
    """Run a command under the fork server, so that it and all its descendants end with it.

    Returns (exit code, output); the code is None when `limit` seconds were not enough.
    """
    log = folder / "output"
    log.touch()
    with gate.server.connect() as sock:
        request = {"op": "exec", "argv": list(argv), "env": env, "cwd": str(folder), "log": str(log)}
        sock.sendall(wire.frame(request))
        events, deadline, status = wire.Reader(sock), time.monotonic() + limit, None
        sock.settimeout(1.0)
        while time.monotonic() < deadline and status is None and not events.closed:
            try:
                events.fill()
            except TimeoutError:
                continue
            while (got := events.next()) is not None:
                if got[0]["event"] == "exit":
                    status = got[0]["status"]
    return status, log.read_text(errors="replace")


def torchrun_argv(size: int, *rest: str) -> list[str]:
    module = ["-m", "torch.distributed.run", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    return [sys.executable, *module, f"--nproc-per-node={size}", *rest]


def torchrun(
    gate: Gate,
    nodeid: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    size: int,
    group: str | None,
    lane: str = "plain",
    env: dict[str, str] | None = None,
    limit: float = LIMIT,
) -> list[Any]:
    """The results of a rank function on `size` ranks under torchrun.

    Violation when one does not finish; Unsupported, Blocked or NotTested as the first one raised it.
    """
    folder = Path(tempfile.mkdtemp(prefix="torchrun-", dir=gate.folder))
    argv = torchrun_argv(size, str(REPLAY), *_replay_args(gate.target, function, args), "--out", str(folder))
    argv += ["--lane", lane]
    if group is not None:
        argv += ["--group", group]
    base = str(folder / "base")
    full = gate.env | gate.target.environment | {"HOME": str(folder), "TMPDIR": str(folder), "NANOCHAT_BASE_DIR": base}
    full |= env or {}
    status, output = command(gate, argv, folder, full, limit)
    files = [folder / f"rank{rank}.pt" for rank in range(size)]
    missing = [str(rank) for rank, file in enumerate(files) if not file.exists()]
    if status == 0 and not missing:
        return [wire.unpack(file.read_bytes()) for file in files]
    how = f"torchrun gave no answer within {limit:.0f} s" if status is None else f"torchrun ended with code {status}"
    first = next((f for f in sorted(folder.glob("rank*.error"), key=os.path.getmtime)), None)
    said = json.loads(first.read_text()) if first else {}
    judge.raise_unjudged(said)
    actual = f"{how}; {first.stem if first else 'rank ' + ', '.join(missing)}: {said.get('text', 'no result')}"
    expected, where = said.get("fields", {}).get("expected", "every rank runs to the end under torchrun"), ""
    traces = [folder / f"rank{rank}.trace" for rank in range(size)]
    mismatch = judge.first_mismatch([observe.read_trace(str(file)) if file.exists() else [] for file in traces])
    if mismatch is not None:
        expected, differs, where = mismatch
        actual = f"{differs}; then {actual}"
    raise Violation(
        expected,
        actual,
        where=where or said.get("where", ""),
        detail="\n".join((said.get("traceback", ""), *output.splitlines()[-30:])),
        repro=repro_lines(gate.target, nodeid, function, args, size, lane),
    )


def _replay_args(target: Target, function: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    file = function.__code__.co_filename
    return ["--nanochat", str(target.root), f"{file}:{function.__name__}", json.dumps(list(args))]


def repro_lines(
    target: Target, nodeid: str, function: Callable[..., Any], args: Sequence[Any], size: int, lane: str
) -> list[str]:
    """Two command lines that run the same again: under our pytest, and in plain torchrun."""
    chosen = [] if target.root == ROOT else ["--nanochat", str(target.root)]
    lane_args = [] if lane == "plain" else ["--lane", lane]
    replay = [str(REPLAY.relative_to(ROOT)), *_replay_args(target, function, args), *lane_args]
    replay[3] = replay[3].removeprefix(str(ROOT) + os.sep)
    return [
        shlex.join(["pytest", nodeid, *chosen]),
        shlex.join(["torchrun", f"--nproc-per-node={size}", *replay]),
    ]
