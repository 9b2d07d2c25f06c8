"""Every named fault is caught by the requirements it names, and most of them leave a run that trains.

`pytest tests/faults -k NAME` tries one, `-k opt.` an area's; with `--everything` a fault meets all suites, and what
caught it is printed.
"""

import json
import math

import pytest

from nanochat_gate import environment, verdict, world
from nanochat_gate import target as targets
from tests.faults import att, ckp, col, dat, edit, evl, gating, lch, opt, pg, train, trn, whole

CATALOGUES = {
    "pg": pg.FAULTS,
    "col": col.FAULTS,
    "att": att.FAULTS,
    "opt": opt.FAULTS,
    "lch": lch.FAULTS,
    "dat": dat.FAULTS,
    "evl": evl.FAULTS,
    "ckp": ckp.FAULTS,
    "trn": trn.FAULTS,
    "whole": whole.FAULTS,
}
AREA = {fault: area for area, faults in CATALOGUES.items() for fault in faults}
FAULTS = list(AREA)
SILENT = [fault for fault in FAULTS if fault.trains]

pytestmark = pytest.mark.faults


def by_name(faults):
    return pytest.mark.parametrize("fault", [pytest.param(fault, id=f"{AREA[fault]}.{fault.name}") for fault in faults])


def test_names_are_unique_and_ids_are_given():
    names = [fault.name for fault in FAULTS]
    assert len(names) == len(set(names))
    assert not [fault.name for fault in FAULTS if not fault.ids and not fault.uncaught]


def test_most_faults_are_silent():
    assert len(SILENT) >= 0.7 * len(FAULTS), "too many faults stop the run: those are noticed without us"


def by_time_out(record):
    return record["actual"].split(": ", 1)[-1].startswith(("hangs", "no answer within", "Failed: Timeout"))


@by_name(FAULTS)
def test_caught(fault, gate, tmp_path, request, capsys):
    """A requirement that stays green on the very break it is there for protects nobody."""
    if fault.uncaught:
        request.applymarker(pytest.mark.xfail(reason=fault.uncaught, strict=True, raises=AssertionError))
    tree = edit.make_copy(tmp_path / "tree")
    edit.apply(fault.edits, tree)
    everything = request.config.getoption("everything", default=False)
    assert gate.server
    assert everything or fault.ids, f"nothing is said to catch {fault.name}"
    gated = gating.gate(tree, tmp_path / "out", gate.address, () if everything else fault.ids, fault.sizes)
    if everything:
        with capsys.disabled():
            print(f"\n{fault.name}: {', '.join(sorted(gated.red)) or 'NOTHING'}")
    levels = set()
    for id in fault.ids:
        records = gated.records(id)
        assert records, f"no test of {id} ran"
        red = gated.red.get(id, [])
        said = [f"{r['params']} {r['state']}: {r['actual'] or 'as it should be'}" for r in records]
        assert red, f"{id} lets {fault.name} through:\n" + "\n".join(said)
        assert fault.hangs or not all(map(by_time_out, red)), f"{id} saw only a time-out:\n" + "\n".join(said)
        levels |= {record["level"] for record in red}
    assert fault.ids or gated.red, "nothing catches it"
    conclusion = gated.run.footer["verdict"]
    assert conclusion == verdict.FAIL if "must" in levels else conclusion not in (verdict.PASS, verdict.INCOMPLETE)
    assert gated.code == 1, gated.output[-3000:]


@by_name(SILENT)
def test_trains(fault, gate, tmp_path):
    """Said to be silent: ranks run to the end and the loss falls, so that only a gate would tell."""
    tree = edit.make_copy(tmp_path / "tree")
    edit.apply(fault.edits, tree)
    falls_at(tree, gate)


def test_reference_trains(gate, tmp_path):
    falls_at(edit.make_copy(tmp_path / "tree"), gate)


def falls_at(tree, gate):
    spec = world.Spec(json.dumps(targets.find(tree).for_ranks()), 2, group=None)
    ranks = world.World(gate.server, spec, environment.base())
    try:
        replies = ranks.call(train.__file__, "losses", [train.STEPS], "losses")
    finally:
        ranks.close()
    for reply in replies:
        assert reply.ok, reply.error.get("traceback") or reply.error["text"]
        assert all(map(math.isfinite, reply.value)), reply.value
        assert max(reply.value[-2:]) < reply.value[0] - train.FALL, reply.value
