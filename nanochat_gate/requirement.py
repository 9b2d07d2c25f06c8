"""The marker a suite puts on a test, and the exceptions that carry a verdict out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

AREAS = {
    "PG": "process group",
    "COL": "collectives",
    "ATT": "attention",
    "OPT": "optimizer",
    "DAT": "data",
    "EVL": "evaluation",
    "CKP": "checkpoint",
    "LCH": "launch",
    "TRN": "training",
}
_ID = re.compile(rf"^({'|'.join(AREAS)})-\d\d$")
_F = TypeVar("_F", bound=Callable[..., Any])


class Violation(AssertionError):
    """The target does not do what a requirement asks.

    expected, actual, where (`file.py:12`) and hint are shown side by side in every report; detail holds the
    output of the first failing rank and repro the commands that run it again.
    """

    def __init__(
        self,
        expected: str,
        actual: str,
        *,
        where: str = "",
        hint: str = "",
        detail: str = "",
        repro: Sequence[str] = (),
    ) -> None:
        super().__init__(f"expected {expected}; got {actual}")
        self.expected = expected
        self.actual = actual
        self.where = where
        self.hint = hint
        self.detail = detail
        self.repro = list(repro)


class Unsupported(Exception):
    """The target does not offer what the requirement speaks of; `what` says what it offers instead."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class Blocked(Exception):
    """The target cannot be imported or started on this machine; `reason` is shown once and the run is red."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NotTested(Exception):
    """This machine lacks what the test needs; `lacks` names it as `--require` does, e.g. "nccl"."""

    def __init__(self, what: str, lacks: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.lacks = lacks


def verify(condition: bool, expected: str, actual: str, *, where: str = "", hint: str = "") -> None:
    """Raise Violation(expected, actual) unless condition holds."""
    __tracebackhide__ = True
    if not condition:
        raise Violation(expected, actual, where=where, hint=hint)


def requirement(
    id: str,
    sentence: str,
    *,
    level: str = "must",
    subject: str = "target",
    claim: str | None = None,
    sizes: Sequence[int] = (),
    core: bool | None = None,
) -> Callable[[_F], _F]:
    """Mark a test as a requirement on the target.

    id:       AREA-NN, unique and never reused.
    sentence: what holds when the test passes, in one sentence.
    level:    "must" decides the verdict, "should" is shown as a deviation unless `--level should`.
    subject:  "target", or "backend" when torch rather than the fork is judged.
    claim:    "cpu" or "cuda" when the requirement binds only a fork that claims that device.
    sizes:    world sizes; a test that takes `size` is run at each of them that `--world-sizes` allows.
    core:     whether a pass shows the target working on two or more ranks; default: when `size` is at least 2.
    """
    if not _ID.match(id):
        raise ValueError(f"requirement id {id!r} is not AREA-NN with an area of {', '.join(AREAS)}")
    if level not in ("must", "should"):
        raise ValueError(f"level {level!r} of {id} is neither 'must' nor 'should'")
    if subject not in ("target", "backend"):
        raise ValueError(f"subject {subject!r} of {id} is neither 'target' nor 'backend'")
    if claim not in (None, "cpu", "cuda"):
        raise ValueError(f"claim {claim!r} of {id} is neither 'cpu' nor 'cuda'")
    mark = pytest.mark.requirement(
        id=id, sentence=sentence, level=level, subject=subject, claim=claim, sizes=tuple(sizes), core=core
    )

    def decorate(test: _F) -> _F:
        marked: _F = mark(test)
        return marked

    return decorate
