"""Gates a checkout in a pytest process of its own, cheaply: forked from one with torch loaded, on a running server."""

import multiprocessing
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from nanochat_gate import verdict

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 280.0  # s for one pytest process; below pytest-timeout's 300

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["torch", "numpy", "psutil", "tabulate", "pytest"])


@dataclass(frozen=True)
class Gated:
    """What a pytest process said of a checkout: its exit code, its verdict file, its output."""

    code: int | None
    run: verdict.Run
    output: str

    def records(self, id):
        return [record for record in self.run.records if record["id"] == id]

    @property
    def red(self):
        """Records of what the target does wrong, by id."""
        found = {}
        for record in self.run.records:
            if record["state"] in (verdict.FAIL, verdict.DEVIATION):
                found.setdefault(record["id"], []).append(record)
        return found


def gate(tree, out, server, ids=(), sizes=(1, 2), env=None):
    """Run the suites on the checkout: the requirements in `ids` at world sizes `sizes`, or without ids all of them.

    server: the address of a running fork server. Raises verdict.Unreadable when the run left no whole verdict.
    """
    argv = [f"--nanochat={tree}", f"--gate-out={out}"]
    if ids:
        folders = sorted({f"suites/{id.split('-')[0].lower()}" for id in ids})
        argv = [*folders, *argv, f"--world-sizes={','.join(map(str, sizes))}", "-k", " or ".join(ids)]
    else:
        argv = ["suites", *argv]
    code, output = run(argv, Path(out) / "output", {"NANOCHAT_GATE_SERVER": server} | (env or {}))
    try:
        whole = verdict.read(Path(out) / verdict.FILE_NAME)
    except verdict.Unreadable as error:
        raise verdict.Unreadable(f"{error}; pytest ended with {code}:\n{output[-3000:]}") from None
    return Gated(code, whole, output)


def run(argv, log, env):
    """`pytest argv` in a process forked for it, at our root: (exit code, output)."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = _forks.Process(target=_pytest, args=(argv, str(log), env))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode, log.read_text(errors="replace") if log.exists() else ""


def _pytest(argv, log, env):
    """In the fork: become `pytest argv`."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ.update(env)
    os.chdir(ROOT)
    import pytest

    sys.exit(int(pytest.main(argv)))
