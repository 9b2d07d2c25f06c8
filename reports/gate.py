"""verdict.jsonl -> verdict.md, fit to paste into a pull request, and verdict.html, one page that needs nothing else.

Rendered at the end of a gate run, or again from the file alone: `python -m reports.gate DIR`.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from nanochat_gate import verdict as v
from nanochat_gate.requirement import AREAS
from nanochat_gate.verdict import Run, Unreadable, read

__all__ = ["Unreadable", "environment", "main", "read", "render"]

TEMPLATES = Path(__file__).parent / "templates"
# Told apart without colour too: a sign and a word go with each.
SIGNS = {v.PASS: "✓", v.FAIL: "✗", v.DEVIATION: "≠", v.UNSUPPORTED: "∅", v.BLOCKED: "■", v.NOT_TESTED: "·"}
_PATH = re.compile(r"(?<![\w.:/~-])/(?:[\w.+@-]+/)+")


def render(outdir: Path) -> list[Path]:
    """Write verdict.md and verdict.html beside `outdir`/verdict.jsonl and return their paths.

    Raises Unreadable when that file must not be believed, OSError when the folder cannot be written to.
    """
    run = read(outdir / v.FILE_NAME)
    known = context(run)
    written = []
    for name, escape in (("verdict.md", False), ("verdict.html", True)):
        env = jinja2.Environment(
            loader=jinja2.FileSystemLoader(TEMPLATES),
            autoescape=escape,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        env.filters.update(code=code, plain=plain, portable=Portable(run.header), params=v.merged, brief=brief)
        text = env.get_template(f"{name}.j2").render(known)
        path = outdir / name
        temporary = path.with_name(f"{name}.{os.getpid()}.tmp")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
        written.append(path)
    return written


def context(run: Run) -> dict[str, Any]:
    """What both templates may use."""
    heading, rows = v.table(run.records)
    return {
        "verdict": run.footer["verdict"],
        "reasons": [*run.footer["reasons"], *filter(None, [partial(run.header)])],
        **{name: str(run.header.get(name) or "") for name in ("package", "started", "seconds")},
        "target": target(run.header),
        "environment": environment(run.header),
        "heading": heading,
        "rows": rows,
        "groups": {state: v.groups(run.records, state) for state in v.STATES},
        "blocked": v.by_reason(r for r in run.records if r["state"] == v.BLOCKED),
        "areas": areas(run.records),
        "counts": run.footer["counts"],
        "totals": Counter(r["id"] for r in run.records),
        "signs": SIGNS,
        "tests": len(run.records),
    }


def target(header: dict[str, Any]) -> str:
    """The target in a few words: folder name, commit, whether it was changed since; never a path."""
    name = os.path.basename(str(header.get("target") or "").rstrip("/")) or "unnamed target"
    commit = header.get("commit")
    text = f"{name} @ {str(commit)[:12]}" if commit else f"{name} (no commit)"
    return text + (" with uncommitted changes" if commit and header.get("dirty") else "")


def environment(header: dict[str, Any]) -> str:
    """Where the run took place and what it was asked, in one line."""
    parts = [
        f"{label} {header[name]}" for name, label in (("torch", "torch"), ("python", "Python")) if header.get(name)
    ]
    parts += [_listed(header[name]) for name in ("backends", "cpu") if header.get(name)]
    parts += [f"{header['gpus']} GPUs"] if header.get("gpus") else []
    parts += [f"claims {_listed(header['claims']) or 'nothing'}"] if header.get("claims") is not None else []
    options = header.get("options")
    for name, value in options.items() if isinstance(options, dict) else ():
        if value not in (None, "", [], {}):
            parts.append(f"--{name.replace('_', '-')} {_listed(value)}")
    return " · ".join(parts)


def _listed(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def partial(header: dict[str, Any]) -> str:
    """A sentence when the selection left tests out, else ""."""
    left_out, ran = header.get("deselected"), header.get("collected")
    if not isinstance(left_out, int) or not isinstance(ran, int) or not left_out:
        return ""
    return f"a part only: {left_out} of {left_out + ran} tests were not selected"


def areas(records: Iterable[v.Record]) -> list[dict[str, Any]]:
    """Areas in order, each with a cell per requirement: its worst state and every test behind it."""
    found: dict[str, dict[str, list[v.Record]]] = {}
    for record in records:
        found.setdefault(record["area"], {}).setdefault(record["id"], []).append(record)
    made = []
    for area in sorted(found, key=v.area_order):
        cells = []
        for id, tests in sorted(found[area].items()):
            state = v.worst(r["state"] for r in tests)
            cells.append({"id": id, "state": state, "tests": tests, "first": tests[0]})
        made.append({"area": area, "title": AREAS.get(area, ""), "cells": cells})
    return made


class Portable:
    """Text without this machine's paths: those in the target become relative, of others only the last part stays."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.root = str(header.get("path") or "").rstrip("/")

    def __call__(self, text: str) -> str:
        if self.root:
            text = text.replace(self.root + "/", "")
        return _PATH.sub("…/", text)


def code(text: str, indent: int = 0) -> str:
    """Text as Markdown code, whatever it holds: a span, or a fenced block indented to stay in its list item."""
    text = text.strip()
    longest = max((len(ticks) for ticks in re.findall(r"`+", text)), default=0)
    if "\n" not in text:
        fence = "`" * (longest + 1)
        pad = " " if text.startswith("`") or text.endswith("`") else ""
        return f"{fence}{pad}{text}{pad}{fence}"
    fence = "`" * max(3, longest + 1)
    lines = [fence, *text.split("\n"), fence]
    return "\n" + "\n".join(" " * indent + line for line in lines)


def plain(text: str) -> str:
    """Text as one line of Markdown prose, with nothing in it read as markup, a mention or a reference."""
    text = re.sub(r"[\\`*<>\[\]|#]|(?<!\w)_|_(?!\w)", r"\\\g<0>", " ".join(text.split()))
    return re.sub(r"@(?=\w)", "@\u200b", text)


def brief(text: str, longest: int = 200) -> str:
    """The first line, cut to `longest` characters."""
    line = text.strip().split("\n")[0]
    return line if len(line) <= longest else line[: longest - 1] + "…"


def main(args: list[str]) -> int:
    """Exit code of `python -m reports.gate DIR`: 0, or 2 with one sentence on what is wrong."""
    if len(args) != 1 or args[0].startswith("-"):
        print("usage: python -m reports.gate DIR   (DIR holds verdict.jsonl)", file=sys.stderr)
        return 2
    try:
        written = render(Path(args[0]))
    except (Unreadable, OSError) as error:
        print(f"reports.gate: {error}", file=sys.stderr)
        return 2
    print("\n".join(str(path) for path in written))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
