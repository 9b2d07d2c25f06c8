"""The fault catalogue: small breaks of the reference, each with the requirements that must catch it.

A requirement is worth what it catches. Each fault here is applied to a copy of the reference, the copy is gated by a
pytest process of its own, and the fault's ids must come out red. A fault that nothing catches is a missing
requirement.

    pg.py col.py att.py opt.py   the catalogues, one per area: `FAULTS`, a list of Fault, in any order
    edit.py                      Fault and Edit, and how an edit finds its place in the syntax tree
    gating.py                    gates a copy in a process forked from one that has torch loaded
    train.py                     trains a faulty copy for a few steps, for faults that say `trains=True`
    test_edit.py                 an edit that finds nothing, or several places, is refused
    test_catalogue.py            applies, gates and judges every fault

To add a fault, append to the FAULTS of its area:

    Fault(
        "adamw-bias-correction-dropped",                       # unique, lower case with hyphens
        "The first steps of AdamW come out several times too large.",     # the harm, one sentence
        Edit("nanochat/optim.py", "_adamw_step", "bias2 = 1 - beta2_t**step_t", "bias2 = 1.0"),
        ids=("OPT-05",),                                       # every one of them must turn red on its own
    ),

An Edit is (file, inside, find, put). `inside` names the function or class, dotted ("MuonAdamW.step"), or is "" for
anything in the file. `find` and `put` are both expressions (then only that expression is replaced), else both are
statements (`put` may be several lines, and "pass" drops one). `find` is compared as a syntax tree, so quotes, spaces,
parentheses and comments do not matter; it must be found exactly once, or `nth=2` says which one, counting from 1.
Several Edits may follow one another where one is not enough. Further arguments of Fault:

    trains=False   a run with this fault stops, or its loss does not fall; says so for what is obvious anyway.
                   Most faults (at least 70%) must be of the kind that nobody notices, and that is measured.
    hangs=True     the fault makes ranks wait for each other for ever, so the ids may be red by time-out alone.
                   Costs 10 s; keep to few.
    sizes=(3,)     shows at other world sizes than 1 and 2.
    uncaught="..." nothing catches it yet, and why; `ids` may be (). Goes red once something does.

Try it with `pytest tests/faults -k adamw-bias`. `pytest tests/faults --everything` runs every fault against every
requirement and lists all that caught it.
"""
