"""Starts torchrun as a shell would, once or several times at once; sends it a signal; says how it all ended.

`driver.py PLAN` with a JSON file: {"runs": [{argv, env, cwd, folder, size, signal}, ...], "report": file, "limit": s}
The report is a list, per run: code (null when the limit was not enough), held (whether every rank came to where the
signal is sent), left (what processes were still there a while after torchrun had ended).
"""

import contextlib
import ctypes
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
GRACE = 10.0  # s for processes that are about to end anyway


def main():
    plan = json.loads(Path(sys.argv[1]).read_text())
    if sys.platform == "linux":  # so that ranks which torchrun leaves behind become children of ours
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The gate's own processes ignore it, and what is ignored stays so in whatever they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    deadline = time.monotonic() + plan["limit"]
    started = [start(run) for run in plan["runs"]]
    pids = {process.pid for process in started}
    reports = [{"code": None, "held": not run.get("signal"), "left": []} for run in plan["runs"]]
    while time.monotonic() < deadline and any(report["code"] is None for report in reports):
        time.sleep(0.05)
        for run, process, report in zip(plan["runs"], started, reports, strict=True):
            report["code"] = process.poll()
            if not report["held"] and report["code"] is None and all_held(run):
                process.send_signal(run["signal"])
                report["held"] = True
    if all(report["code"] is not None for report in reports):
        until = min(deadline, time.monotonic() + GRACE)
        while (left := remaining(pids)) and time.monotonic() < until:
            time.sleep(0.05)
        for run, report in zip(plan["runs"], reports, strict=True):
            report["left"] = sorted(f"{name} (pid {pid})" for pid, name in left if belongs(pid, run))
    Path(plan["report"]).write_text(json.dumps(reports))


def start(run):
    with open(Path(run["folder"]) / "output", "wb") as log:
        return subprocess.Popen(
            run["argv"], env=run["env"], cwd=run["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )


def all_held(run):
    return all((Path(run["folder"]) / f"rank{rank}.held").exists() for rank in range(run["size"]))


def remaining(pids):
    """(pid, command) of every process that is still running under this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in pids and process.status() != psutil.STATUS_ZOMBIE:
                found.append((process.pid, " ".join(process.cmdline()[-3:]) or process.name()))
    return found


def belongs(pid, run):
    """Whether a process was started by this run: its environment names the run's folder."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).environ().get("TMPDIR") == run["env"]["TMPDIR"]
    return True


if __name__ == "__main__":
    main()
