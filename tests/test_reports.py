"""verdict.md and verdict.html: do they say what verdict.jsonl says, wherever they are pasted or opened?"""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from nanochat_gate import verdict as v
from reports import gate

ROOT = Path(gate.__file__).parents[1]
HEADER = {
    "target": "my-fork",
    "path": "/home/me/src/my-fork",
    "package": "nanochat",
    "commit": "92d63d4d6a1b2f3c4d5e",
    "dirty": True,
    "torch": "2.13.0",
    "python": "3.11.7",
    "backends": ["gloo"],
    "cpu": "a CPU, 2 cores",
    "claims": ["cpu"],
    "options": {"level": "must", "world_sizes": [1, 2]},
    "collected": 9,
    "deselected": 3,
    "seconds": 4.2,
    "started": "2026-07-01T10:00:00+00:00",
}


def record(id, state=v.PASS, size="2", **fields):
    made = dict.fromkeys(("sentence", "expected", "actual", "where", "hint", "detail"), "")
    made |= {"id": id, "area": id.split("-")[0], "state": state, "params": {"size": size}, "level": "must"}
    made |= {"subject": "target", "claim": None, "seconds": 0.1, "nodeid": f"{id}[{size}]", "repro": [], "core": True}
    return v.Record(**{**made, **fields})


FAILED = record(
    "OPT-02",
    v.FAIL,
    sentence="averages gradients <everywhere>",
    expected="the mean",
    actual="the sum, says /home/me/src/my-fork/nanochat/optim.py and /usr/lib/thing.py <script>alert(1)</script>",
    where="nanochat/optim.py:7",
    hint="divide by N, see @someone and #12",
    repro=["pytest suites -k 'opt & bad'"],
    detail="rank 1 said hello\n</pre><b>",
)
SEVERAL = [
    record("PG-01"),
    record("COL-01"),
    record("OPT-01"),
    FAILED,
    record("OPT-02", v.FAIL, size="3", actual="the\nsum ``` of three", expected="x"),
    record("DAT-01", v.DEVIATION, sentence="more ranks than row groups", actual="spins", level="should"),
    record("PG-02", v.UNSUPPORTED, sentence="makes a group", actual="every rank trains alone", claim="cpu"),
    record("TRN-01", v.BLOCKED, actual="no module named x"),
    record("TRN-02", v.BLOCKED, actual="no module named x"),
    record("COL-02", v.NOT_TESTED, actual="no GPU"),
]


@pytest.fixture
def render(tmp_path):
    def go(records, header=HEADER, stops=()):
        ids = [r["nodeid"] for r in records]
        v.write(tmp_path / v.FILE_NAME, header, records, v.conclude(records, ids, ids, stops))
        md, html = gate.render(tmp_path)
        return md.read_text(encoding="utf-8"), html.read_text(encoding="utf-8")

    return go


class Page(HTMLParser):
    """Tags, ids, links and text of a page, and whether every tag was closed."""

    VOID = ("meta", "br", "hr", "img", "link", "input")

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text, self.wrong = [], [], [], [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("href", "src") if name in found]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data):
        self.text += data


def test_md_tells_all(render):
    """A pull request shows only this: what is missing from it is not known to who merges."""
    md, _ = render(SEVERAL)
    for text in (
        "## nanochat gate: FAIL",
        "my-fork @ 92d63d4d6a1b with uncommitted changes",
        "torch 2.13.0 · Python 3.11.7 · gloo · a CPU, 2 cores · claims cpu · --level must · --world-sizes 1,2",
        "| OPT | 1 | 2 |",
        "- expected: `the mean`",
        "- where: `nanochat/optim.py:7`",
        "divide by N",
        "also at size=3",
        "every rank trains alone",
        "spins",
        "no GPU",
        "holds up TRN-01, TRN-02",
        "3 of 12 tests were not selected",
    ):
        assert text in md, text
    assert md.count("no module named x") == 2  # in the reasons and under Blocked


def test_md_holds_no_path_of_this_machine(render):
    """A report in a public pull request must not carry user names and folders."""
    md, _ = render(SEVERAL)
    assert "/home" not in md
    assert "/usr" not in md
    assert "says nanochat/optim.py and …/thing.py" in md


def test_md_markup_is_ours(render):
    """Text from a target must not mention people, link issues or end our code blocks."""
    md, _ = render(SEVERAL)
    assert "@someone" not in md
    assert r"\#12" in md
    assert r"averages gradients \<everywhere\>" in md
    assert gate.code("a ` b") == "``a ` b``"
    assert gate.code("a\n```").split("\n") == ["", "````", "a", "```", "````"]


@pytest.mark.parametrize("state", v.STATES)
def test_md_table_is_a_table(render, state):
    """A row with a cell too few is shown as a line of bars."""
    md, _ = render([record("PG-01"), record("ATT-01", state, actual="a | b")])
    rows = [line for line in md.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1
    assert md[md.index(rows[0]) - 2 : md.index(rows[0])] == "\n\n"


def test_html_is_whole_and_stands_alone(render):
    """A page that loads something shows nothing on the machine it was sent to."""
    _, html = render(SEVERAL)
    page = Page(html)
    assert (page.open, page.wrong) == ([], [])
    assert all(link.startswith("#") for link in page.links)
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert not re.search(r"url\(|@import|https?://", html)
    assert "prefers-color-scheme: dark" in html


def test_html_tells_all(render):
    """Expected, actual, where, hint and the lines to see it again are what a failure is fixed with."""
    page = Page(render(SEVERAL)[1])
    for text in ("the mean", "nanochat/optim.py:7", "divide by N", "pytest suites -k 'opt & bad'", "rank 1 said hello"):
        assert text in page.text, text
    for id in {r["id"] for r in SEVERAL}:
        assert f"all-{id}" in page.ids
    assert page.tags.count("script") == 1  # ours; the target's text stayed text
    assert "<script>alert(1)</script>" in page.text


def test_html_states_differ_without_colour(render):
    """Who cannot tell red from green must still see which is which."""
    page = Page(render(SEVERAL)[1])
    assert len(set(gate.SIGNS.values())) == len(v.STATES)
    for state in v.STATES:
        assert f"{gate.SIGNS[state]} {state}" in page.text


@pytest.mark.parametrize("records", [[], [record("PG-01")], SEVERAL[:3]], ids=["none", "one", "green"])
@pytest.mark.parametrize("header", [{}, {"commit": None, "target": "x", "backends": 3, "options": "y", "claims": []}])
def test_any_file_that_reads_renders(render, records, header):
    """A run that broke early has a header with holes; its report is needed most."""
    md, html = render(records, header)
    assert "None" not in md
    assert Page(html).open == []


def test_incomplete_is_not_dressed_as_green(render):
    """The colour and the word at the top are all that many will look at."""
    md, html = render(SEVERAL[:3], stops=["worker gw0 crashed"])
    assert "## nanochat gate: INCOMPLETE" in md
    assert 'class="verdict incomplete"' in html
    assert "worker gw0 crashed" in html


def main(*args):
    return subprocess.run([sys.executable, "-m", "reports.gate", *args], cwd=ROOT, capture_output=True, text=True)


def test_command_renders_again(render, tmp_path):
    """A verdict.jsonl from a CI artifact becomes a page without running anything."""
    render(SEVERAL)
    (tmp_path / "verdict.md").unlink()
    done = main(str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "verdict.md").exists()


@pytest.mark.parametrize("what", ["missing", "cut", "file", "none", "option"])
def test_command_says_what_is_wrong(render, tmp_path, what):
    """One clear sentence, whatever it is given."""
    render(SEVERAL)
    path = tmp_path / v.FILE_NAME
    if what == "missing":
        path.unlink()
    if what == "cut":
        path.write_text(path.read_text()[:-10])
    args = {"file": [str(path)], "none": [], "option": ["--help"]}.get(what, [str(tmp_path)])
    done = main(*args)
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""
