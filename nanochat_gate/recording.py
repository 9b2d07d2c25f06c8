"""A pytest plugin: turns the outcome of each requirement into a record, and ends the run with a verdict.

A record is made where the test ran and travels in the report's user_properties, so it survives xdist. The report's
outcome is set to match the state, so pytest's own exit code is the gate's. The controller collects the records and
what was to run, concludes, writes verdict.jsonl and calls `pytest_gate_written`.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast

import pytest
from tabulate import tabulate

from nanochat_gate import verdict as v
from nanochat_gate.requirement import Blocked, NotTested, Unsupported, Violation

CLAIMS: pytest.StashKey[frozenset[str]] = pytest.StashKey()
HEADER: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
_SECONDS: pytest.StashKey[float] = pytest.StashKey()

PROPERTY = "gate"
OUTPUTS = (v.FILE_NAME, "verdict.md", "verdict.html")
LONGEST = {"detail": 20_000}
LONGEST_OTHER = 4_000
BRIEF = 160
# Options under which pytest has a session and runs no test of it.
LISTING = ("collectonly", "showfixtures", "show_fixtures_per_test")
# Colour codes, and whatever else would spoil a terminal or a JSON line.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")


class Hooks:
    @pytest.hookspec
    def pytest_gate_written(self, config: pytest.Config, path: Path) -> None:
        """verdict.jsonl was written at `path`; reports may now be made of it."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    pluginmanager.add_hookspecs(Hooks)


def pytest_configure(config: pytest.Config) -> None:
    worker = hasattr(config, "workerinput")
    config.pluginmanager.register(Worker(config) if worker else Controller(config), "gate-recorder")


def out_dir(config: pytest.Config) -> Path:
    """Where this run's reports go: `--gate-out`, else reports/out/gate under the root."""
    chosen = config.getoption("gate_out", default=None)
    return config.invocation_params.dir / chosen if chosen else config.rootpath / "reports" / "out" / "gate"


# What became of one test


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    # Outermost, so that no xfail mark and no other plugin has the last word on a requirement.
    report = yield
    marker = item.get_closest_marker("requirement")
    if marker is None:
        return report
    item.stash[_SECONDS] = item.stash.get(_SECONDS, 0) + call.duration
    error = call.excinfo.value if call.excinfo else None
    if error is None and call.when != "call":
        return report
    record = _blank(item, marker.kwargs)
    _judge(record, error, item.config, report)
    if call.when == "teardown":
        # Whatever the test found, a world that could not be taken down is no pass.
        record["state"], record["actual"] = v.FAIL, f"at teardown: {record['actual']}"
    for name, value in record.items():
        if isinstance(value, str):
            record[name] = clean(value, LONGEST.get(name, LONGEST_OTHER))  # type: ignore[literal-required]
    _report_as(report, record, item, error)
    report.user_properties.append((PROPERTY, record))
    return report


def _blank(item: pytest.Item, mark: Any) -> v.Record:
    callspec = getattr(item, "callspec", None)
    given = callspec.params if callspec else {}
    # pytest's placeholder, an enum, stands where no value was left to choose from.
    params = {name: _label(value) for name, value in given.items() if not str(value).startswith("NotSetType")}
    core = mark.get("core")
    size = params.get("size", "")
    groups = {
        str(mark.args[0] if mark.args else mark.kwargs.get("name", "default"))
        for mark in item.iter_markers("xdist_group")
    }
    return v.Record(
        id=mark["id"],
        area=mark["id"].split("-")[0],
        sentence=mark["sentence"],
        params=params,
        level=mark.get("level", "must"),
        subject=mark.get("subject", "target"),
        claim=mark.get("claim"),
        state=v.PASS,
        expected="",
        actual="",
        where="",
        hint="",
        seconds=round(float(item.stash[_SECONDS]), 4),
        # Under --dist loadgroup xdist appends groups to the node id; with them the test can't be selected again.
        nodeid=item.nodeid.removesuffix("@" + "_".join(sorted(groups))),
        repro=[],
        detail="",
        core=(size.isdecimal() and int(size) >= 2) if core is None else bool(core),
    )


def _label(value: object) -> str:
    if value is None or isinstance(value, (str, int, float, tuple, list)):
        return str(value)
    name = getattr(value, "__name__", None) or getattr(value, "name", None)
    # A default repr holds an address, which differs from run to run.
    return str(name) if name else re.sub(r" at 0x[0-9a-f]+", "", str(value))


def _judge(record: v.Record, error: BaseException | None, config: pytest.Config, report: pytest.TestReport) -> None:
    """Fill in the state and its texts."""
    if error is None:
        return
    if isinstance(error, Unsupported):
        record.update({"state": v.UNSUPPORTED, "actual": error.what})
    elif isinstance(error, Blocked):
        record.update({"state": v.BLOCKED, "actual": error.reason})
    elif isinstance(error, NotTested):
        required = error.lacks and error.lacks in _required(config)
        state, prefix = (v.BLOCKED, f"--require {error.lacks}: ") if required else (v.NOT_TESTED, "")
        record.update({"state": state, "actual": prefix + error.what})
    elif isinstance(error, pytest.skip.Exception):
        record.update({"state": v.NOT_TESTED, "actual": str(error) or "skipped"})
    else:
        if isinstance(error, Violation):
            record.update({"expected": error.expected, "actual": error.actual, "where": error.where})
            record.update({"hint": error.hint, "detail": error.detail})
            record["repro"] = [clean(line, LONGEST_OTHER) for line in error.repro]
        else:
            said = str(error).strip().split("\n")[0]
            record["actual"] = type(error).__name__ + (f": {said}" if said else "")
            record["detail"] = report.longreprtext
        claim = record["claim"]
        if claim and claim not in config.stash.get(CLAIMS, frozenset()):
            record["state"] = v.UNSUPPORTED
        elif record["level"] == "should" and config.getoption("level", default="must") != "should":
            record["state"] = v.DEVIATION
        else:
            record["state"] = v.FAIL


def _required(config: pytest.Config) -> list[str]:
    named = config.getoption("require", default=None) or []
    return [name.strip() for part in ([named] if isinstance(named, str) else named) for name in part.split(",")]


def _report_as(report: pytest.TestReport, record: v.Record, item: pytest.Item, error: BaseException | None) -> None:
    """Give pytest's report the outcome that the state stands for."""
    vars(report).pop("wasxfail", None)
    state = record["state"]
    if state == v.PASS:
        report.outcome = "passed"
    elif state == v.FAIL or (state == v.BLOCKED and isinstance(error, NotTested)):
        report.outcome = "failed"
        if isinstance(error, (Violation, NotTested)):
            report.longrepr = "\n".join([*block([record]), "", record["detail"]]).rstrip()
        elif not isinstance(report.longrepr, str) and not hasattr(report.longrepr, "toterminal"):
            report.longrepr = f"{record['id']}: {record['actual']}"
    else:
        report.outcome = "skipped"
        if state == v.DEVIATION:
            report.wasxfail = f"deviation: {brief(record['actual'])}"
        path, line, _ = item.location
        report.longrepr = (path, (line or 0) + 1, f"{state}: {brief(record['actual'])}")


def clean(text: str, longest: int) -> str:
    """Text that any terminal, JSON file and xdist channel can carry; the middle of what is too long is left out."""
    text = _CONTROL.sub("", text.replace("\r\n", "\n")).encode("utf-8", "replace").decode()
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]}\n... {len(text) - longest} characters left out ...\n{text[-half:]}"


def brief(text: str) -> str:
    """The first line, of at most BRIEF characters."""
    line = text.strip().split("\n")[0]
    return line if len(line) <= BRIEF else line[: BRIEF - 3] + "..."


# What became of the run


class Worker:
    """On an xdist worker: only tells the controller how many tests the selection left out."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.deselected = 0

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_sessionfinish(self) -> None:
        self.config.workeroutput["gate_deselected"] = self.deselected  # type: ignore[attr-defined]


class Controller:
    """Collects records and what was to run, here or on xdist's workers, and concludes."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = datetime.now(timezone.utc)
        self.path = out_dir(config) / v.FILE_NAME
        self.collected: dict[str, None] = {}
        self.ran: set[str] = set()
        self.reported: set[str] = set()
        self.records: dict[str, v.Record] = {}
        self.stops: dict[str, str] = {}
        self.deselected = 0
        self.gating = False
        self.conclusion: v.Conclusion | None = None

    def gate(self) -> None:
        """From here on this is a run of the gate: what an earlier one left must not outlive it."""
        if not self.gating and not any(self.config.getoption(name, default=False) for name in LISTING):
            self.gating = True
            for name in OUTPUTS:
                (self.path.parent / name).unlink(missing_ok=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        # First, so that nothing that breaks while the run is being set up leaves an old verdict behind.
        suites = self.config.rootpath / "suites"
        for arg in self.config.args:
            named = (self.config.invocation_params.dir / str(arg).split("::")[0]).resolve()
            if suites.is_dir() and (named == suites or suites in named.parents or named in suites.parents):
                self.gate()

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self.deselected += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected.update(dict.fromkeys(item.nodeid for item in session.items))
        if any(item.get_closest_marker("requirement") for item in session.items):
            self.gate()

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.collected.update(dict.fromkeys(ids))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        self.deselected = max(self.deselected, getattr(node, "workeroutput", {}).get("gate_deselected", 0))
        if error:
            self.stops.setdefault(node.gateway.id, f"worker {node.gateway.id} went down: {brief(str(error))}")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.stops[report.nodeid] = f"{report.nodeid or 'the session'} could not be collected"

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        said = brief(str(excinfo.value)) or excinfo.typename
        self.stops["interrupt"] = f"the run was stopped: {said}"

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.stops["internal error"] = f"pytest broke: {excinfo.typename}: {brief(str(excinfo.value))}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call", "teardown"):  # xdist: the worker died while it ran this test
            worker = getattr(report, "node", None)
            self.stops[worker.gateway.id if worker else report.nodeid] = brief(str(report.longrepr))
            return
        records = [cast(v.Record, value) for name, value in report.user_properties if name == PROPERTY]
        for record in records:
            self.gate()
            known = self.records.get(report.nodeid)
            # A test that is reported twice (a failing teardown, a rerun) keeps its worst.
            if known is None or v.worst([known["state"], record["state"]]) != known["state"]:
                self.records[report.nodeid] = record
        if report.failed and not records and report.nodeid not in self.records:
            self.stops[report.nodeid] = f"{report.nodeid} failed and is not a requirement"
        if report.when == "call" or not report.passed:
            self.ran.add(report.nodeid)
        # With --setup-only a test is set up and taken down without being run.
        if report.when == "teardown" and report.nodeid in self.ran:
            self.reported.add(report.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        unheard = exitstatus == pytest.ExitCode.USAGE_ERROR and not self.records
        if not self.gating or unheard:
            return
        for asked in (session.shouldfail, session.shouldstop):
            if asked and len(self.reported) < len(self.collected):
                self.stops["asked"] = f"the run was stopped: {asked}"
        records = list(self.records.values())
        self.conclusion = v.conclude(records, self.collected, self.reported, list(self.stops.values()))
        if self.conclusion.verdict == v.PASS and exitstatus not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            stop = f"pytest ended with exit code {int(exitstatus)}, for which no test accounts"
            self.conclusion = v.conclude(records, self.collected, self.reported, [stop])
        given: dict[str, Any] = self.config.stash.get(HEADER, {})
        header = {
            **given,
            "started": self.started.isoformat(timespec="seconds"),
            "seconds": round((datetime.now(timezone.utc) - self.started).total_seconds(), 1),
            "collected": len(self.collected),
            "deselected": self.deselected,
        }
        v.write(self.path, header, records, self.conclusion)
        if self.conclusion.verdict != v.PASS and exitstatus in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.config.hook.pytest_gate_written(config=self.config, path=self.path)

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.conclusion is None:
            return
        green = self.conclusion.verdict == v.PASS
        terminalreporter.section("nanochat gate", green=green, red=not green)
        for line in summary(list(self.records.values())):
            terminalreporter.write_line(line)
        for reason in self.conclusion.reasons:
            terminalreporter.write_line(f"  {reason}")
        shown = self.path.parent
        if self.config.rootpath in shown.parents:
            shown = shown.relative_to(self.config.rootpath)
        terminalreporter.write_line(f"report: {shown}")
        line = f"verdict: {self.conclusion.verdict}"
        terminalreporter.write_line(line, bold=True, green=green, red=not green)


# What the terminal shows


def block(alike: Sequence[v.Record]) -> list[str]:
    """Lines for records that failed in the same way."""
    first = alike[0]
    params = v.merged(alike)
    lines = [f"{first['state']} {first['id']}{f' [{params}]' if params else ''} {first['sentence']}"]
    for name, text in (
        ("expected", first["expected"]),
        ("actual", first["actual"]),
        ("where", first["where"]),
        ("hint", first["hint"]),
        ("again", "\n".join(first["repro"])),
    ):
        if text:
            lines.append(f"  {name:<8}  " + text.strip().replace("\n", "\n" + " " * 12))
    return lines


def summary(records: Sequence[v.Record]) -> list[str]:
    """Failures first, then what is not red in a line each, then areas x states."""
    lines: list[str] = []
    for group in v.groups(records, v.FAIL):
        lines += block(group.outcomes[0])
        for other in group.outcomes[1:]:
            lines.append(f"  also at   {v.merged(other) or other[0]['nodeid']}: {brief(other[0]['actual'])}")
        lines.append("")
    blocked = v.by_reason(r for r in records if r["state"] == v.BLOCKED)
    for reason, held_up in blocked.items():
        names = v.some(sorted({r["id"] for r in held_up}))
        lines += [f"{v.BLOCKED} {reason.strip()}", f"  holds up  {names}", ""]
    for state, title in (
        (v.DEVIATION, "deviations (a should that failed; does not decide)"),
        (v.UNSUPPORTED, "unsupported (not offered or not claimed; what really happens)"),
        (v.NOT_TESTED, "not tested (this machine lacks it)"),
    ):
        found = v.groups(records, state)
        if found:
            lines.append(f"{title}:")
            for group in found:
                lines.append(
                    f"  {group.id}{f' [{group.params}]' if group.params else ''}: {brief(group.first['actual'])}"
                )
            lines.append("")
    heading, rows = v.table(records)
    return [
        *lines,
        *tabulate(rows, heading, disable_numparse=True, colalign=("left", *["right"] * (len(heading) - 1))).split("\n"),
        "",
    ]
