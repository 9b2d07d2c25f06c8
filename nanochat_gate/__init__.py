"""The engine of the gate: targets, ranks, observed collectives, exact inputs and the verdict.

A map, from the outside in:

    options      what the command line accepts, and one clear line for what it does not
    plugin       pytest hooks and fixtures: starts the fork server, looks at the target, hands out ranks
    requirement  the marker a suite puts on a test, and the exceptions that carry a verdict
    recording    turns test outcomes into records, and ends the run
    verdict      states and the rules that decide green or red
    target       finds the nanochat in a checkout, without importing it
    facts        what a target really does on this machine, asked once in rank processes
    world        ranks as pytest sees them: start, run a function on each, time out, clean up
    judge        what the replies of all ranks amount to
    server       the preloaded process that forks ranks
    rank         the other side: the loop each rank runs, and what a rank function is given
    adapt        one interface over the revisions of nanochat, used inside ranks only
    standins     imports a target's KVCache where packages its tokenizer needs are missing
    observe      collectives recorded
    withheld     collectives withheld until they are waited for
    exact        gradients whose sums and averages are exactly representable
    launch       real torchrun
"""

from nanochat_gate.requirement import Blocked, NotTested, Unsupported, Violation, requirement, verify

__all__ = ["Blocked", "NotTested", "Unsupported", "Violation", "requirement", "verify"]
