"""LCH: real torchrun, two runs at once.

LCH-01  flags after `--` reach the script, and two runs side by side each have a world of their own
LCH-02  a flag of the script's without `--` reaches it or is refused (backend, should)
"""

import json
import re
import tempfile
from pathlib import Path

from nanochat_gate import launch, requirement, verify
from suites.lch.launching import ended
from suites.lch.runs import HELD_AT, STEPS, launched, verify_reached


@requirement(
    "LCH-01",
    "Two runs of the training script under torchrun, side by side, train on ranks of their own with their own flags",
    claim="cpu",
    sizes=(2,),
)
def test_side_by_side(ranks, size):
    """Runs that meet on a port, a file or a folder end each other, or train and overwrite one another's model.

    One of the two is cancelled on its way, which must be nothing to the other.
    """
    complete, cancelled = (launched(ranks, size, name) for name in ("complete", "SIGTERM"))
    for report, steps, which in ((complete, STEPS, "first"), (cancelled, HELD_AT, "second")):
        verify_reached(report, min(steps, HELD_AT), f"step {min(steps, HELD_AT)} in the {which} of two runs at once")
        for rank, note in enumerate(report["notes"]):
            verify(
                note["world"] == size,
                f"every rank of the {which} of two runs at once is in a world of {size}",
                f"rank {rank} is in a world of {note['world']}",
            )
    verify(complete["code"] == 0, "a run ends with code 0 beside another that is cancelled", ended(complete))
    for rank, note in enumerate(complete["notes"]):
        made = f"rank {rank} made {note['steps']} optimizer steps"
        verify(note["steps"] == STEPS, f"--num-iterations={STEPS} after `--` reaches the script", made)
    if complete["checkpoints"]:
        saved = [str(Path(file).relative_to(Path(complete["checkpoints"]).parent)) for file in complete["saved"]]
        verify(
            any(re.fullmatch(rf"complete/model_0*{STEPS}\.pt", name) for name in saved),
            f"step {STEPS} is saved in the folder of --model-tag=complete",
            f"the two runs left {', '.join(saved) or 'nothing'}",
        )


@requirement(
    "LCH-02",
    "Without `--` before it, torchrun passes a flag of the script's on or refuses it, and does not swallow it",
    level="should",
    subject="backend",
)
def test_without_dashes(gate):
    """torchrun takes --run for the start of --run-path: swallowed, a run would train under a default unnoticed."""
    folder = Path(tempfile.mkdtemp(prefix="dashes-", dir=gate.folder))
    trivial, got = folder / "trivial.py", folder / "argv.json"
    trivial.write_text(f"import json, sys\njson.dump(sys.argv[1:], open({str(got)!r}, 'w'))\n")
    env = gate.env | {"HOME": str(folder), "TMPDIR": str(folder)}
    flag = "--run=side-by-side"
    status, output = launch.command(gate, launch.torchrun_argv(1, str(trivial), flag), folder, env, launch.LIMIT)
    arrived = json.loads(got.read_text()) if got.exists() else None
    said = " ".join(output.split())[-200:]
    verify_passed_or_refused(flag, status, arrived, said)


def verify_passed_or_refused(flag, status, arrived, said):
    refused = bool(status) and arrived is None
    verify(
        refused or arrived == [flag],
        f"torchrun without `--` gives the script {flag}, or refuses it with another code than 0",
        f"torchrun ended with code {status}, the script got {arrived}: {said}",
        hint="put `--` before the script's flags",
    )
