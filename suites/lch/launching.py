"""Runs of the target's training script under real torchrun, and how the LCH suite words what came of them."""

import json
import re
import sys
import tempfile
from pathlib import Path

from nanochat_gate import Blocked, Unsupported, launch, standins, verify
from suites.whole import flags

HERE = Path(__file__).resolve().parent
LIMIT = 150.0  # s for all runs of one driver
# How a script ends that wants a file from the network; the gate lets nobody have one.
OFFLINE = re.compile(
    r"URLError|urlopen error|NameResolutionError|ConnectionError|OfflineModeIsEnabled|LocalEntryNotFound"
)


def plan(ranks, found, size, base, send=0, fail=None, hold=None, **wanted):
    """One run of the script: what the driver needs to start it, and where its ranks leave notes."""
    target = ranks.gate.target
    folder = Path(tempfile.mkdtemp(prefix="launch-", dir=ranks.gate.folder))
    said = {"module": found.module, "path": found.path, "package": target.package, "standins": standins.__file__}
    said |= {"folder": str(folder), "fail": fail, "hold": hold}
    env = ranks.gate.env | target.environment
    env |= {"HOME": str(folder), "TMPDIR": str(folder), "NANOCHAT_BASE_DIR": base, "GATE_SCRIPT": json.dumps(said)}
    # The `--` that users are told to put there, so that torchrun takes no flag of the script's for its own.
    argv = launch.torchrun_argv(size, str(HERE / "wrapper.py"), "--", *flags(found, size, **wanted))
    cwd = target.cwd or found.path  # revisions with a configurator open it relative to the checkout
    return {"argv": argv, "env": env, "cwd": cwd, "folder": str(folder), "size": size, "signal": int(send)}


def run(ranks, *plans):
    """Run them all at once. Per run: code, held and left (see driver), output, and notes, what each rank noted."""
    if ranks.facts.blocked:
        raise Blocked(ranks.facts.blocked)
    folder = Path(tempfile.mkdtemp(prefix="driver-", dir=ranks.gate.folder))
    file, report = folder / "plan.json", folder / "report.json"
    file.write_text(json.dumps({"runs": plans, "report": str(report), "limit": LIMIT}))
    status, output = launch.command(
        ranks.gate, [sys.executable, str(HERE / "driver.py"), str(file)], folder, ranks.gate.env, LIMIT + 30
    )
    if not report.exists():
        raise RuntimeError(f"the driver of the gate ended with {status}: {output[-2000:]}")
    reports = json.loads(report.read_text())
    for one, given in zip(reports, plans, strict=True):
        notes = [Path(given["folder"]) / f"rank{rank}.json" for rank in range(given["size"])]
        one["notes"] = [json.loads(note.read_text()) if note.exists() else None for note in notes]
        one["output"] = (Path(given["folder"]) / "output").read_text(errors="replace")
    return reports


def ended(report):
    """One sentence on how a run ended, with the end of what it said."""
    tail = " ".join(" ".join(last_error(report["output"])).split())[-300:]
    how = "torchrun did not end" if report["code"] is None else f"torchrun ended with code {report['code']}"
    return f"{how}: {tail}" if tail else how


def last_error(output):
    """The lines that say most of why a run failed: the last exceptions of ranks, else the last lines."""
    lines = [line for line in output.splitlines() if line.strip()]
    own = lines[: next((i for i, line in enumerate(lines) if "torch/distributed/run.py" in line), len(lines))]
    errors = [
        line for line in own if re.match(r"(\[rank\d+\]: ?)?([\w.]+(Error|Exception|Interrupt)\b|rank \d+: )", line)
    ]
    return list(dict.fromkeys(errors))[-2:] or lines[-3:]


def needs_no_network(report):
    if report["code"] and OFFLINE.search(report["output"]):
        raise Unsupported(
            f"the training script wants a file from the network: {' '.join(last_error(report['output']))}"
        )


def verify_nothing_left(report, after):
    left = ", ".join(report["left"])
    verify(not left, f"no process of the run is left {after}", f"still there: {left}")
