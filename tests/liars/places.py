"""Where a gate run's processes are, to see that none of them outlives it."""

import time

import psutil


def survivors(place, seconds=20.0):
    """Processes that run in a folder under `place`, as every rank and all that it starts do, after a while at most."""
    deadline = time.monotonic() + seconds
    while (found := _running_in(str(place))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _running_in(place):
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(place) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
        except psutil.Error:
            continue
    return found
