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


def gate(tree, out, server, ids=()):
    """Run `pytest suites` on the checkout: the requirements in `ids` on up to three ranks, or without ids all of it.

    server: the address of a running fork server. Raises verdict.Unreadable when the run left no whole verdict.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    argv = ["suites", f"--nanochat={tree}", f"--gate-out={out}"]
    if ids:
        argv += ["--world-sizes=1,2,3", "-k", " or ".join(ids)]
    log = out / "output"
    process = _forks.Process(target=_pytest, args=(argv, str(log), {"NANOCHAT_GATE_SERVER": server}))
    process.start()
    process.join(LIMIT)
    if process.is_alive():
        process.kill()
        process.join()
    output = log.read_text(errors="replace") if log.exists() else ""
    try:
        run = verdict.read(out / verdict.FILE_NAME)
    except verdict.Unreadable as error:
        raise verdict.Unreadable(f"{error}; pytest ended with {process.exitcode}:\n{output[-3000:]}") from None
    return Gated(process.exitcode, run, output)


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
