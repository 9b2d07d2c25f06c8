"""The runs under torchrun that the LCH suite looks at: four, in two pairs side by side, each made once.

A run under torchrun costs some seconds of both cores, so each serves several requirements.
"""

import signal
from pathlib import Path

from nanochat_gate import script, verify
from suites.lch.launching import ended, needs_no_network, plan, run
from suites.whole import new_base

STEPS = 4  # of the run that comes to its end
FAILS_IN = 2  # a step in which every rank has something to wait for
SAVE_EVERY, HELD_AT = 2, 3
# Far more than a rank needs to notice a signal, and made within the 30 s after which torchrun kills what goes on.
LONG = 40
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}
PAIRS = (("complete", "SIGTERM"), ("raises", "SIGINT"))


def settings(name, size):
    """What makes a run the one of this name."""
    if name in SIGNALS:
        return {"send": SIGNALS[name], "hold": HELD_AT, "steps": LONG, "save_every": SAVE_EVERY}
    return {"complete": {"steps": STEPS}, "raises": {"steps": LONG, "fail": [size - 1, FAILS_IN]}}[name]


def launched(ranks, size, name):
    """The report of one run (see launching.run), with `saved`, the checkpoint files it left; tagged: by what name."""
    pair = next(pair for pair in PAIRS if name in pair)

    def make():
        found = script.find(ranks.gate.target)
        tagged = "model_tag" in found.flags  # then both write below one base directory, as a user's runs do
        base = new_base(ranks)
        bases = [base, base if tagged else new_base(ranks)]
        plans = [
            plan(ranks, found, size, base, model_tag=one, **settings(one, size))
            for one, base in zip(pair, bases, strict=True)
        ]
        reports = run(ranks, *plans)
        for one, base, report in zip(pair, bases, reports, strict=True):
            folder = Path(base) / "base_checkpoints"
            report["checkpoints"] = str(folder / one) if tagged else ""
            report["saved"] = sorted(str(file) for file in folder.glob("*/*"))
        return dict(zip(pair, reports, strict=True))

    return ranks.gate.shared(f"lch-{'-'.join(pair)}-{size}", make)[name]


def verify_reached(report, steps, what):
    """Every rank came so far; Unsupported where the run ended for want of a network."""
    reached = all(note is not None and note["steps"] >= steps for note in report["notes"])
    if not reached:
        needs_no_network(report)
    verify(reached, f"every rank trains to {what}", ended(report))
