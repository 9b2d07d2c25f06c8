"""The rules that turn records into a verdict, and the file that carries it."""

import json

import pytest

from nanochat_gate import verdict as v


def record(id="PG-01", state=v.PASS, **fields):
    made = {
        "id": id,
        "area": id.split("-")[0],
        "sentence": "a sentence",
        "params": {"size": "2"},
        "level": "must",
        "subject": "target",
        "claim": None,
        "state": state,
        "expected": "",
        "actual": "",
        "where": "",
        "hint": "",
        "seconds": 0.1,
        "nodeid": f"suites/{id}.py::test",
        "repro": [],
        "detail": "",
        "core": True,
    }
    return v.Record(**{**made, **fields})


def core():
    return [record("PG-01"), record("COL-01"), record("OPT-01")]


def verdict_of(records, **kwargs):
    ids = [r["nodeid"] for r in records]
    return v.conclude(records, kwargs.pop("collected", ids), kwargs.pop("reported", ids), **kwargs)


def test_pass_needs_the_core_and_nothing_red():
    """The one green: were it out of reach, no fork could merge."""
    found = verdict_of([*core(), record("DAT-01", v.UNSUPPORTED), record("DAT-02", v.DEVIATION)])
    assert found.verdict == v.PASS
    assert found.reasons == ["3 tests passed, 3 of them on two or more ranks"]
    assert found.counts == {v.PASS: 3, v.UNSUPPORTED: 1, v.DEVIATION: 1}


@pytest.mark.parametrize("area", ["PG", "COL", "OPT"])
@pytest.mark.parametrize(
    "change",
    [{"state": v.UNSUPPORTED}, {"core": False}, {"subject": "backend"}, {"state": v.NOT_TESTED}, {"area": "ATT"}],
    ids=str,
)
def test_core_not_exercised_is_inconclusive(area, change):
    """A target whose collectives were never seen on two ranks is not known to train on them."""
    records = [r | change if r["area"] == area else r for r in core()]
    found = verdict_of(records)
    assert found.verdict == v.INCONCLUSIVE
    assert area in found.reasons[0]


def test_nothing_ran_is_inconclusive():
    """Zero tests, zero failures: the oldest false green."""
    assert verdict_of([]).verdict == v.INCONCLUSIVE


@pytest.mark.parametrize(
    ("extra", "kwargs", "expected"),
    [
        ([record("ATT-01", v.FAIL)], {}, v.FAIL),
        ([record("ATT-01", v.BLOCKED, actual="no module")], {}, v.BLOCKED),
        ([record("ATT-01", v.FAIL), record("ATT-02", v.BLOCKED)], {}, v.FAIL),
        ([record("COL-09", v.FAIL, subject="backend")], {}, v.INCONCLUSIVE),
        ([record("COL-09", v.FAIL, subject="backend"), record("ATT-01", v.FAIL)], {}, v.FAIL),
        ([], {"stops": ["worker gw0 crashed"]}, v.INCOMPLETE),
        ([record("ATT-01", v.FAIL)], {"stops": ["worker gw0 crashed"]}, v.INCOMPLETE),
        ([], {"reported": []}, v.INCOMPLETE),
    ],
)
def test_precedence(extra, kwargs, expected):
    """A run cut short must not read as a judgement, nor a broken backend as the fork's fault, nor either as green."""
    assert verdict_of([*core(), *extra], **kwargs).verdict == expected


def test_incomplete_still_names_what_failed():
    """Whoever stops at the first failure wants to read it."""
    found = verdict_of([*core(), record("ATT-01", v.FAIL)], stops=["stopped"])
    assert found.reasons == ["stopped", "1 requirement failed: ATT-01"]


def test_missing_tests_are_counted_and_named():
    """'Something did not run' without a name leaves nothing to look for."""
    found = v.conclude(core(), [f"t{n}" for n in range(9)], ["t0"])
    assert found.reasons[0] == "8 of 9 tests did not finish: t1, t2, t3 and 5 more"


def test_blocked_reason_is_told_once():
    """One missing module blocks every test; forty copies of it hide the rest."""
    blocked = [record("ATT-01", v.BLOCKED, actual="no x"), record("ATT-02", v.BLOCKED, actual="no x")]
    assert verdict_of([*core(), *blocked]).reasons == ["2 requirements could not be judged: no x"]


def test_worst_orders_every_state():
    """A requirement that failed at one size and passed at three others failed."""
    assert v.worst([v.PASS, v.FAIL, v.NOT_TESTED]) == v.FAIL
    assert v.worst([v.NOT_TESTED, v.PASS]) == v.PASS
    assert set(v.SEVERITY) == set(v.STATES)


def test_alike_failures_are_told_once():
    """Twelve parametrisations of one fault are one thing to read."""
    records = [record("OPT-01", v.FAIL, actual="x", params={"size": n}) for n in ("10", "2", "3")]
    records.append(record("OPT-01", v.FAIL, actual="y", params={"size": "4"}))
    (group,) = v.groups(records, v.FAIL)
    assert [v.merged(alike) for alike in group.outcomes] == ["size=2,3,10", "size=4"]
    assert group.params == "size=2,3,4,10"


def test_table_adds_up():
    """A table that loses a state shows a cleaner run than there was."""
    records = [*core(), record("ATT-01", v.FAIL), record("ATT-02", v.NOT_TESTED)]
    heading, rows = v.table(records)
    assert heading == ["area", v.PASS, v.FAIL, v.NOT_TESTED]
    assert rows[-1] == ["all", "3", "1", "1"]
    assert [row[0] for row in rows] == ["PG", "COL", "ATT", "OPT", "all"]


@pytest.fixture
def written(tmp_path):
    records = core()
    path = tmp_path / "sub" / v.FILE_NAME
    v.write(path, {"target": "fork"}, records, verdict_of(records))
    return path


def test_round_trip(written):
    """What was judged is what is read."""
    run = v.read(written)
    assert run.records == core()
    assert (run.header["target"], run.footer["verdict"], run.footer["lines"]) == ("fork", v.PASS, 5)
    assert [p.name for p in written.parent.iterdir()] == [v.FILE_NAME]


def edit(number, **fields):
    def change(lines):
        return [
            json.dumps(json.loads(line) | fields) if n == number % len(lines) else line for n, line in enumerate(lines)
        ]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda lines: lines[:-1], "cut off"),
        (lambda lines: [*lines[:-1], lines[-1][:-9]], "cut off"),
        (lambda lines: lines[:1] + lines[2:], "footer counts 5"),
        (lambda lines: [*lines[:2], *lines[1:]], "footer counts 5"),
        (lambda lines: lines[1:], "no header"),
        (lambda lines: [], "not a JSON object"),
        (lambda lines: [lines[0], "{", *lines[2:]], "line 2"),
        (lambda lines: [lines[0], "[]", *lines[2:]], "line 2"),
        (edit(0, format=2), "format 2"),
        (edit(1, state="FINE"), "known state"),
        (edit(1, state=v.FAIL), "other states"),
        (edit(1, params=["size"]), "'params'"),
        (edit(1, params={"size": []}), "not text"),
        (edit(1, expected=None), "'expected'"),
        (edit(-1, verdict="GREEN"), "with a verdict"),
        (edit(-1, kind="requirement", note='"kind": "footer"'), "footer"),
        (edit(-1, reasons="x"), "reasons"),
    ],
)
def test_refused(written, change, says):
    """A file that was cut, merged by hand or written by another version must never be read as a green."""
    lines = change(written.read_text().splitlines())
    written.write_text("".join(line + "\n" for line in lines) if "cut" not in says else "\n".join(lines))
    with pytest.raises(v.Unreadable) as error:
        v.read(written)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_every_cut_is_refused(written):
    """Wherever a full disk or a kill ends the file, what is left is no verdict."""
    whole = written.read_bytes()
    for length in range(0, len(whole), 7):
        written.write_bytes(whole[:length])
        with pytest.raises(v.Unreadable):
            v.read(written)


@pytest.mark.parametrize("data", [None, b"\xff\xfe\n", b""])
def test_unreadable_file(tmp_path, data):
    """Whatever lies at that path, one sentence and no traceback."""
    path = tmp_path / v.FILE_NAME
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(v.Unreadable):
        v.read(path)


def test_odd_text_survives(tmp_path):
    """Line separators and lone surrogates in a rank's output must not break the file into other lines."""
    records = [*core(), record("ATT-01", v.FAIL, actual="a\u2028b\nc \x85 é")]
    path = tmp_path / v.FILE_NAME
    v.write(path, {"target": "\udc80"}, records, verdict_of(records))
    assert v.read(path).records == records
