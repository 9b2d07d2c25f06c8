"""What a run of the gate concludes, and the file that carries it.

A record is what became of one requirement under one parametrisation. `conclude` turns records, and what was collected
but never reported, into a verdict. The first of these that holds is the verdict:

    INCOMPLETE    something that was collected never reported, or the run was cut short. What failed until then is
                  listed, but a run that did not finish cannot say what else would have.
    FAIL          the target does not do what a requirement asks.
    BLOCKED       the target cannot be imported or started here, or `--require` names what this machine lacks.
    INCONCLUSIVE  a requirement on the backend failed, which says nothing about the target; or no requirement on the
                  target passed on two or more ranks in one of the areas PG, COL and OPT; or nothing ran at all.
    PASS          none of these. Only this one is green.

The file is JSON, one object a line: a header, the records, a footer. A file without its footer was cut off, and
`read` refuses it. Pure functions: nothing here knows pytest or torch.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, cast

from nanochat_gate.requirement import AREAS

FORMAT = 1
FILE_NAME = "verdict.jsonl"

PASS, FAIL, DEVIATION, UNSUPPORTED, BLOCKED = "PASS", "FAIL", "DEVIATION", "UNSUPPORTED", "BLOCKED"
NOT_TESTED, INCONCLUSIVE, INCOMPLETE = "NOT TESTED", "INCONCLUSIVE", "INCOMPLETE"
STATES = (PASS, FAIL, DEVIATION, UNSUPPORTED, BLOCKED, NOT_TESTED)
VERDICTS = (PASS, FAIL, BLOCKED, INCONCLUSIVE, INCOMPLETE)
# Worst first. One test skipped for lack of a GPU does not outweigh the same requirement passed on CPU.
SEVERITY = (FAIL, BLOCKED, DEVIATION, UNSUPPORTED, PASS, NOT_TESTED)
CORE_AREAS = ("PG", "COL", "OPT")
NAMED = 8  # ids or tests a sentence names before it says "and N more"


class Record(TypedDict):
    """One requirement under one parametrisation. Texts may be empty; `seconds` is setup and call together."""

    id: str
    area: str
    sentence: str
    params: dict[str, str]
    level: str
    subject: str
    claim: str | None
    state: str
    expected: str
    actual: str
    where: str
    hint: str
    seconds: float
    nodeid: str
    repro: list[str]
    detail: str
    core: bool


_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(Record.__annotations__, str),
    "params": dict,
    "claim": (str, type(None)),
    "seconds": (int, float),
    "repro": list,
    "core": bool,
}


@dataclass(frozen=True)
class Conclusion:
    """A verdict with its reasons as sentences, the most important first."""

    verdict: str
    reasons: list[str]
    counts: dict[str, int]


@dataclass(frozen=True)
class Run:
    """A verdict file that was read whole."""

    header: dict[str, Any]
    records: list[Record]
    footer: dict[str, Any]


class Unreadable(ValueError):
    """A verdict file that must not be believed; the message is one sentence."""


def conclude(
    records: Sequence[Record], collected: Collection[str], reported: Collection[str], stops: Sequence[str] = ()
) -> Conclusion:
    """Judge a run.

    collected: node ids that were to run, after deselection.
    reported:  node ids that ran to their end.
    stops:     sentences on what cut the run short: a crash, -x, Ctrl-C, a file that could not be collected.
    """
    counts = {state: count for state in STATES if (count := sum(r["state"] == state for r in records))}
    found: list[tuple[str, str]] = []

    done = set(reported)
    missing = [nodeid for nodeid in collected if nodeid not in done]
    for stop in stops:
        found.append((INCOMPLETE, stop))
    if missing:
        found.append((INCOMPLETE, f"{len(missing)} of {len(collected)} tests did not finish: {some(missing, 3)}"))

    failed = [r for r in records if r["state"] == FAIL]
    charged = [r for r in failed if r["subject"] != "backend"]
    if charged:
        found.append((FAIL, f"{_requirements(charged)} failed: {some(_ids(charged))}"))

    blocked = [r for r in records if r["state"] == BLOCKED]
    for reason, held_up in by_reason(blocked).items():
        found.append((BLOCKED, f"{_requirements(held_up)} could not be judged: {reason}"))

    backend = [r for r in failed if r["subject"] == "backend"]
    if backend:
        verb = "fails" if len(_ids(backend)) == 1 else "fail"
        found.append(
            (
                INCONCLUSIVE,
                f"{_requirements(backend)} on the backend {verb} on this machine, which is not charged to the target "
                f"but leaves no ground to judge it on: {some(_ids(backend))}",
            )
        )
    if not found:
        found.extend((INCONCLUSIVE, sentence) for sentence in _unexercised(records))
    if not found:
        ranks = sum(r["core"] and r["state"] == PASS for r in records)
        return Conclusion(PASS, [f"{counts[PASS]} tests passed, {ranks} of them on two or more ranks"], counts)
    # Stable: within a verdict the order of discovery stays.
    found.sort(key=lambda pair: (INCOMPLETE, FAIL, BLOCKED, INCONCLUSIVE).index(pair[0]))
    return Conclusion(found[0][0], [sentence for _, sentence in found], counts)


def _unexercised(records: Sequence[Record]) -> list[str]:
    if not records:
        return ["no requirement ran"]
    exercised = {r["area"] for r in records if r["state"] == PASS and r["core"] and r["subject"] == "target"}
    lacking = [area for area in CORE_AREAS if area not in exercised]
    if not lacking:
        return []
    return [f"no requirement on the target passed on two or more ranks in {' and '.join(lacking)}"]


def _ids(records: Iterable[Record]) -> list[str]:
    return sorted({r["id"] for r in records})


def _requirements(records: Sequence[Record]) -> str:
    ids, tests = len(_ids(records)), len(records)
    return f"{ids} requirement{'s' * (ids != 1)}" + (f" ({tests} tests)" if tests != ids else "")


def some(names: Sequence[str], limit: int = NAMED) -> str:
    """The first names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def worst(states: Iterable[str]) -> str:
    """The state that stands for several. Raises ValueError on none."""
    return min(states, key=SEVERITY.index)


def by_reason(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by what they say really happened, in the order they come."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["actual"], []).append(record)
    return groups


def merged(records: Iterable[Record]) -> str:
    """The params of several records in one: `size=2,3,4 backend=gloo`."""
    values: dict[str, dict[str, None]] = {}
    for record in records:
        for name, value in record["params"].items():
            values.setdefault(name, {})[value] = None
    return " ".join(f"{name}={','.join(_numbers_first(seen))}" for name, seen in values.items())


def _numbers_first(values: Iterable[str]) -> list[str]:
    return sorted(values, key=lambda v: (0, int(v), v) if v.isdecimal() else (1, 0, v))


@dataclass(frozen=True)
class Group:
    """One requirement and all its records in one state. `outcomes` are records that say the same, the most
    frequent first, so that a fault seen at every size is told once."""

    id: str
    state: str
    records: list[Record]

    @property
    def first(self) -> Record:
        return self.outcomes[0][0]

    @property
    def params(self) -> str:
        return merged(self.records)

    @property
    def outcomes(self) -> list[list[Record]]:
        alike: dict[tuple[str, ...], list[Record]] = {}
        for r in self.records:
            alike.setdefault((r["expected"], r["actual"], r["where"], r["hint"]), []).append(r)
        return sorted(alike.values(), key=len, reverse=True)


def groups(records: Iterable[Record], state: str) -> list[Group]:
    """Records in `state` by requirement; those on the target come before those on the backend."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record["state"] == state:
            found.setdefault(record["id"], []).append(record)
    made = [Group(id, state, found[id]) for id in found]
    return sorted(made, key=lambda g: (g.records[0]["subject"] == "backend", area_order(g.records[0]["area"]), g.id))


def area_order(area: str) -> tuple[int, str]:
    """Sort key: the order of AREAS, then any area it does not know."""
    return ([*AREAS, area].index(area), area)


def table(records: Sequence[Record]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of areas x states, counting tests; a state that never occurs has no column."""
    states = [s for s in STATES if s in (PASS, FAIL) or any(r["state"] == s for r in records)]
    areas = sorted({r["area"] for r in records}, key=area_order)
    counts = Counter((r["area"], r["state"]) for r in records)
    rows = [[area, *(str(counts[area, s] or "") for s in states)] for area in areas]
    rows.append(["all", *(str(sum(counts[area, s] for area in areas) or "") for s in states)])
    return ["area", *states], rows


def write(path: Path, header: Mapping[str, Any], records: Sequence[Record], conclusion: Conclusion) -> None:
    """Write a verdict file at once or not at all; `lines` in the footer counts every line, itself included."""
    footer = {
        "kind": "footer",
        "counts": conclusion.counts,
        "verdict": conclusion.verdict,
        "reasons": conclusion.reasons,
        "lines": len(records) + 2,
    }
    lines = [{"kind": "header", "format": FORMAT, **header}, *({"kind": "requirement", **r} for r in records), footer]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line, default=str) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def read(path: Path) -> Run:
    """Read a verdict file whole. Raises Unreadable, in one sentence, on any file that must not be believed."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise Unreadable(f"no verdict can be read from {path}: {what}") from None
    lines = text.removesuffix("\n").split("\n")
    header = _parse(path, 1, lines[0])
    if header.get("kind") != "header":
        raise Unreadable(f"{path} is not a verdict file: its first line is no header")
    if header.get("format") != FORMAT:
        raise Unreadable(f"{path} has format {header.get('format')!r}, and this version reads only format {FORMAT}")
    if not text.endswith("\n") or '"kind": "footer"' not in lines[-1]:
        raise Unreadable(f"{path} has no footer: the run that wrote it was cut off")
    footer = _parse(path, len(lines), lines[-1])
    if footer.get("kind") != "footer" or footer.get("verdict") not in VERDICTS:
        raise Unreadable(f"{path} has no footer with a verdict")
    if footer.get("lines") != len(lines):
        raise Unreadable(f"{path} has {len(lines)} lines where its footer counts {footer.get('lines')}")
    if not isinstance(footer.get("reasons"), list) or not all(isinstance(r, str) for r in footer["reasons"]):
        raise Unreadable(f"{path} has a footer without reasons")
    records = [_record(path, number, line) for number, line in enumerate(lines[1:-1], start=2)]
    if footer.get("counts") != dict(Counter(r["state"] for r in records)):
        raise Unreadable(f"{path} holds other states than its footer counts")
    return Run(header, records, footer)


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unreadable(f"line {number} of {path} is not a JSON object")
    return value


def _record(path: Path, number: int, line: str) -> Record:
    value = _parse(path, number, line)
    if value.pop("kind", None) != "requirement" or value.get("state") not in STATES:
        raise Unreadable(f"line {number} of {path} is not a requirement with a known state")
    for name, kind in _TYPES.items():
        if name not in value or not isinstance(value[name], kind):
            raise Unreadable(f"line {number} of {path} has no valid {name!r}")
    if not all(isinstance(text, str) for text in (*value["params"].values(), *value["repro"])):
        raise Unreadable(f"line {number} of {path} has params or repro that are not text")
    return cast(Record, value)
