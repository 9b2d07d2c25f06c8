"""A lying checkout is red, for the true reason, and nothing it started survives the run."""

import psutil
import pytest

from nanochat_gate import verdict
from tests.faults import edit, gating
from tests.liars.lies import LIARS
from tests.liars.places import survivors

RED = (verdict.FAIL, verdict.BLOCKED)


def test_survivors_are_seen(place):
    """The check of the process table below must be able to fail."""
    process = psutil.Popen(["sleep", "600"], cwd=place, start_new_session=True)
    try:
        assert [line.split()[0] for line in survivors(place, 0)] == [str(process.pid)]
    finally:
        process.kill()
        process.wait()
    assert not survivors(place)


@pytest.mark.parametrize("liar", [pytest.param(liar, id=liar.name) for liar in LIARS])
def test_is_red(liar, gate, place):
    """A gate that a dead, silent or boasting rank can turn green is worse than none."""
    tree = edit.make_copy(place / "tree")
    with open(tree / liar.file, "a") as file:
        file.write("\n\n" + liar.code)
    assert gate.server
    gated = gating.gate(tree, place / "out", gate.address, liar.ids, env={"TMPDIR": str(place)})
    told = "\n".join(f"{r['id']} {r['params']} {r['state']}: {r['actual']} {r['where']}" for r in gated.run.records)
    assert gated.code == 1, gated.output[-3000:]
    assert gated.run.footer["verdict"] == liar.verdict, told
    assert not survivors(place)
    for id in liar.ids:
        records = [r for r in gated.records(id) if r["params"].get("size") != "1"]
        assert records, f"no test of {id} ran"
        for record in records:
            assert (record["state"] in RED) == (id in liar.red), told
            if id in liar.red:
                assert liar.says in record["actual"], told
                assert liar.where in record["where"], told
    said = [line for line in gated.output.splitlines() if line.startswith("verdict: ")]
    assert said == [f"verdict: {liar.verdict}"], gated.output[-1000:]
