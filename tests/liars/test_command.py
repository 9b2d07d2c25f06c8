"""Lies that only the command line a user types can meet: pytest's own loading of files, and our own server's end."""

import os
import signal
import subprocess
import sys
import time

import pytest

from nanochat_gate import verdict
from nanochat_gate.server import ROOT
from tests.faults import edit, gating
from tests.liars.lies import LIARS
from tests.liars.places import survivors


def start(place, *argv, env=None):
    """`pytest argv` as a user starts it, with every file of it under `place`."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "NANOCHAT_"))}
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", *argv],
        cwd=ROOT,
        env=clean | {"TMPDIR": str(place)} | (env or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lying(place, name):
    liar = next(liar for liar in LIARS if liar.name == name)
    tree = edit.make_copy(place / "tree")
    with open(tree / liar.file, "a") as file:
        file.write("\n\n" + liar.code)
    return tree


def test_half_renamed_fork_is_not_given_our_nanochat(place):
    """A fork that renamed its folder but not all imports would be judged by our code, and be green."""
    tree = edit.make_copy(place / "tree")
    (tree / "nanochat").rename(tree / "mychat")
    pyproject = tree / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace('package = "nanochat"', 'package = "mychat"'))
    argv = ["suites/", "-n", "2", "--nanochat", str(tree), "-k", "PG-01 or OPT-02", f"--gate-out={place / 'out'}"]
    process = start(place, *argv, env={"PYTHONPATH": str(ROOT)})
    output, _ = process.communicate(timeout=250)
    assert process.returncode == 1, output
    run = verdict.read(place / "out" / verdict.FILE_NAME)
    told = {(record["id"], record["state"], record["actual"]) for record in run.records}
    optim = "importing mychat.optim fails: ModuleNotFoundError: No module named 'nanochat'"
    assert run.footer["verdict"] == verdict.BLOCKED, told
    assert {(id, state) for id, state, _ in told} == {("PG-01", verdict.PASS), ("OPT-02", verdict.BLOCKED)}, told
    assert all("No module named 'nanochat'" in actual for _, state, actual in told if state == verdict.BLOCKED), optim
    assert not survivors(place)


def test_nothing_survives_a_killed_gate(place):
    """A cancelled CI job must not leave hanging ranks, which hold ports, memory and GPUs."""
    process = start(place, "suites/", "--nanochat", str(lying(place, "hangs-on-rank-1")), "-k", "OPT-01")
    try:
        deadline = time.monotonic() + 120
        while len(survivors(place, 0)) < 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert len(survivors(place, 0)) >= 3, "the server and two ranks should be running"
    finally:
        os.kill(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    assert not survivors(place), output


@pytest.fixture
def booby_trapped(place):
    """A copy of the reference whose test files would run in pytest's own process."""
    tree = edit.make_copy(place / "tree")
    trap = f"open({str(place / 'sprung')!r}, 'a').write(__file__ + chr(10))\n"
    (tree / "tests").mkdir()
    (tree / "suites").mkdir()
    for file in ("conftest.py", "tests/conftest.py", "tests/test_mine.py", "suites/conftest.py", "suites/test_mine.py"):
        (tree / file).write_text(trap + "\n\ndef test_mine():\n    pass\n")
    (tree / "pytest.ini").write_text("[pytest]\naddopts = --co\n")
    return tree


@pytest.mark.parametrize("form", ["two words", "one word", "from the environment"])
def test_test_files_of_a_fork_are_not_run(booby_trapped, gate, place, form):
    """A fork's conftest.py in pytest's process could turn any verdict green."""
    assert gate.server
    env = {"NANOCHAT_GATE_SERVER": gate.address, "TMPDIR": str(place)}
    chosen = {"two words": ["--nanochat", str(booby_trapped)], "one word": [f"--nanochat={booby_trapped}"]}.get(
        form, []
    )
    if not chosen:
        env["NANOCHAT_TARGET"] = str(booby_trapped)
    argv = ["suites/", *chosen, "-k", "PG-01", "--world-sizes=2", f"--gate-out={place / 'out'}"]
    _, output = gating.run(argv, place / "output", env)
    assert not (place / "sprung").exists(), (place / "sprung").read_text()
    run = verdict.read(place / "out" / verdict.FILE_NAME)
    assert [(r["id"], r["state"]) for r in run.records] == [("PG-01", verdict.PASS)], output
    assert run.header["path"] == str(booby_trapped)
    assert "test_mine" not in output


def test_a_target_taken_for_a_test_folder_is_refused(booby_trapped, place):
    """Before suites/, pytest has loaded the fork's conftest by the time we can look: no verdict may come of that."""
    argv = ["--nanochat", str(booby_trapped), "suites/", f"--gate-out={place / 'out'}"]
    code, output = gating.run(argv, place / "output", {"TMPDIR": str(place)})
    assert code == pytest.ExitCode.USAGE_ERROR, output
    assert "write it as one word" in output
    assert not (place / "out").exists()
