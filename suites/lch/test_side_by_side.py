"""LCH: real torchrun, two runs at once.

LCH-01  flags after `--` reach the script, and two runs side by side each have a world of their own
LCH-02  a flag of the script's without `--` reaches it or is refused (backend, should)
"""

import json
import re
import tempfile
from pathlib import Path

from nanochat_gate import launch, requirement, script, verify
from suites.lch.launching import ended, needs_no_network, run
from suites.lch.launching import plan as planned
from suites.whole import new_base

STEPS = {"left": 3, "right": 4}


def both(ranks, size):
    """The two runs, with what checkpoints they left."""

    def make():
        found = script.find(ranks.gate.target)
        tagged = "model_tag" in found.flags
        base = new_base(ranks)
        bases = {tag: base if tagged else new_base(ranks) for tag in STEPS}
        plans = [planned(ranks, found, size, bases[tag], steps=n, model_tag=tag) for tag, n in STEPS.items()]
        reports = run(ranks, *plans)
        for tag, report in zip(STEPS, reports, strict=True):
            folder = Path(bases[tag]) / "base_checkpoints"
            report["tagged"] = tagged
            report["saved"] = sorted(str(file.relative_to(folder)) for file in folder.glob("*/*"))
        return reports

    return ranks.gate.shared(f"lch-both-{size}", make)


@requirement(
    "LCH-01",
    "Two runs of the training script under torchrun, side by side, train on ranks of their own with their own flags",
    claim="cpu",
    sizes=(2,),
)
def test_side_by_side(ranks, size):
    """Runs that meet on a port, a file or a folder end each other, or train and overwrite one another's model."""
    for (tag, steps), report in zip(STEPS.items(), both(ranks, size), strict=True):
        needs_no_network(report)
        here = f"run {tag} of two at once"
        verify(report["code"] == 0, f"{here} ends with code 0", ended(report), hint="each works alone? then they meet")
        for rank, note in enumerate(report["notes"]):
            verify(note is not None, f"rank {rank} of {here} trains", "it made no optimizer step")
            world = f"rank {rank} of {here} is in a world of {note['world']}"
            verify(note["world"] == size, f"every rank of {here} is in a world of {size}", world)
            verify(
                note["steps"] == steps,
                f"--num-iterations={steps} after `--` reaches the script",
                f"rank {rank} of {here} made {note['steps']} optimizer steps",
            )
        if report["tagged"]:
            others = [name for name in STEPS if name != tag]
            mine = [name for name in report["saved"] if re.fullmatch(rf"{tag}/model_0*{steps}\.pt", name)]
            saved = f"it left {', '.join(report['saved']) or 'nothing'}"
            verify(bool(mine), f"{here} saves step {steps} in the folder of --model-tag={tag}", saved)
            odd = [name for name in report["saved"] if name.split("/")[0] not in (tag, *others)]
            verify(not odd, f"{here} writes to no other folder of checkpoints", saved)


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
