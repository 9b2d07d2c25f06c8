"""Real pytest runs of tiny suites, with and without xdist: is the exit code the gate's, and the file the truth?"""

import json
from pathlib import Path

import pytest

from nanochat_gate import verdict as v

CONFTEST = """
    pytest_plugins = ["nanochat_gate.recording"]

    def pytest_addoption(parser):
        parser.addoption("--level", default="must")
        parser.addoption("--require", default=[], action="append")
        parser.addoption("--gate-out", dest="gate_out")

    def pytest_configure(config):
        from nanochat_gate import recording
        config.stash[recording.CLAIMS] = frozenset({"cuda"})
        config.stash[recording.HEADER] = {"target": str(config.rootpath / "fork"), "torch": "2.13"}
        config.addinivalue_line("markers", "requirement: one")

    def pytest_gate_written(config, path):
        print("WRITTEN", path.name)
"""
HEAD = """
    import os, pytest
    from nanochat_gate.requirement import Blocked, NotTested, Unsupported, Violation, requirement

"""
CORE = """
    @requirement("PG-01", "a group of the right size")
    @pytest.mark.parametrize("size", [2, 3])
    def test_pg(size): pass

    @requirement("COL-01", "a handle waits", core=True)
    def test_col(): pass

    @requirement("OPT-01", "sharded equals single", core=True)
    def test_opt(): pass

"""
XDIST = pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["here", "xdist"])


@pytest.fixture
def gate(pytester, monkeypatch):
    """gate(body, *args) -> (exit code, run or None, terminal text)."""
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeini("[pytest]\naddopts = -p no:cacheprovider -p no:benchmark --import-mode=importlib")
    pytester.makeconftest(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", str(Path(v.__file__).parents[1]))

    def run(body, *args, core=True, alone=False):
        (pytester.path / "suites").mkdir(exist_ok=True)
        source = pytester.makepyfile(test_it=HEAD + (CORE if core else "") + body)
        source.rename(pytester.path / "suites" / source.name)
        # A process of its own only where it matters: it costs a second.
        run_it = pytester.runpytest_subprocess if alone or "-n" in args else pytester.runpytest_inprocess
        result = run_it("suites", *args)
        path = pytester.path / "reports" / "out" / "gate" / "verdict.jsonl"
        return result.ret, v.read(path) if path.exists() else None, result.stdout.str()

    return run


def states(run):
    return {r["id"]: r["state"] for r in run.records}


@XDIST
def test_green(gate, workers):
    """A suite that passes at two ranks in every core area must not be held back or lost between workers."""
    code, run, text = gate("", *workers)
    assert (code, run.footer["verdict"], len(run.records)) == (0, v.PASS, 4)
    assert run.header["collected"] == 4
    assert run.header["torch"] == "2.13"
    assert "verdict: PASS" in text
    assert "WRITTEN verdict.jsonl" in text or workers


@XDIST
def test_violation_is_red_and_tells_all(gate, workers):
    """A red gate whose report lacks what was expected, where, and how to see it again sends a maintainer searching."""
    code, run, text = gate(
        """
    @requirement("OPT-02", "averages gradients")
    @pytest.mark.parametrize("size", [2, 3])
    def test_bad(size):
        raise Violation("the mean", "the sum", where="fork/optim.py:7", hint="divide by N", detail="rank 1 said hello",
                        repro=["pytest suites -k bad"])
    """,
        *workers,
    )
    assert (code, run.footer["verdict"]) == (1, v.FAIL)
    record = next(r for r in run.records if r["id"] == "OPT-02")
    assert record["expected"] == "the mean"
    assert record["where"] == "fork/optim.py:7"
    assert record["repro"] == ["pytest suites -k bad"]
    assert record["core"]
    ours = text[text.index("nanochat gate") :]
    for word in ("OPT-02 [size=2,3]", "the mean", "the sum", "fork/optim.py:7", "divide by N", "pytest suites -k bad"):
        assert word in ours
    assert "rank 1 said hello" in text
    assert "def test_bad" not in text  # pytest's own traceback of our raise tells nobody anything


@XDIST
def test_every_outcome_has_its_state(gate, workers):
    """A failed should must not stop a merge, and nothing that did not happen may be called passed."""
    code, run, text = gate(
        """
    @requirement("DAT-01", "a should", level="should")
    def test_should(): raise Violation("a", "b")

    @requirement("DAT-02", "not offered")
    def test_unsupported(): raise Unsupported("has no loader")

    @requirement("DAT-03", "needs a GPU")
    def test_not_tested(): raise NotTested("no GPU here", lacks="nccl")

    @requirement("DAT-04", "claimed by nobody", claim="cpu")
    def test_unclaimed(): raise Violation("a group", "every rank trains alone")

    @requirement("DAT-05", "skipped")
    def test_skip(): pytest.skip("not today")
    """,
        *workers,
    )
    assert (code, run.footer["verdict"]) == (0, v.PASS)
    found = states(run)
    assert [found[f"DAT-0{n}"] for n in (1, 2, 3, 4, 5)] == [
        v.DEVIATION,
        v.UNSUPPORTED,
        v.NOT_TESTED,
        v.UNSUPPORTED,
        v.NOT_TESTED,
    ]
    assert "every rank trains alone" in text
    assert "4 passed, 4 skipped, 1 xfailed" in text
    assert run.footer["counts"] == {"PASS": 4, "DEVIATION": 1, "UNSUPPORTED": 2, "NOT TESTED": 2}


@XDIST
def test_level_should_lets_a_should_decide(gate, workers):
    """`--level should` that stays green on a failed should would be a switch connected to nothing."""
    body = '@requirement("DAT-01", "x", level="should")\n    def test_s(): raise Violation("a", "b")'
    code, run, _ = gate("    " + body, "--level", "should", *workers)
    assert (code, states(run)["DAT-01"], run.footer["verdict"]) == (1, v.FAIL, v.FAIL)


@XDIST
def test_claimed_must_fails(gate, workers):
    """What a fork claims binds it: a claim must not turn a failure into UNSUPPORTED."""
    body = '@requirement("DAT-01", "x", claim="cuda")\n    def test_s(): raise Violation("a", "b")'
    code, run, _ = gate("    " + body, *workers)
    assert (code, states(run)["DAT-01"]) == (1, v.FAIL)


@XDIST
def test_require_makes_a_lack_red(gate, workers):
    """A GPU runner that lost its GPU must not gate green on what was never tried."""
    body = '@requirement("DAT-01", "x")\n    def test_s(): raise NotTested("no GPU", lacks="nccl")'
    code, run, text = gate("    " + body, "--require", "nccl", *workers)
    assert (code, run.footer["verdict"]) == (1, v.BLOCKED)
    assert "--require nccl: no GPU" in text


@XDIST
def test_blocked_is_red_and_told_once(gate, workers):
    """A target that cannot be imported must not be green because every test of it was skipped."""
    code, run, text = gate(
        """
    @pytest.fixture
    def target(): raise Blocked("cannot import gpt: no module named x")

    @requirement("TRN-01", "trains")
    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_t(target, size): pass
    """,
        *workers,
    )
    assert (code, run.footer["verdict"]) == (1, v.BLOCKED)
    assert run.footer["counts"]["BLOCKED"] == 3
    assert text.count("BLOCKED cannot import gpt: no module named x") == 1


@XDIST
def test_any_exception_fails(gate, workers):
    """A crash in a test, in its setup or in its teardown is a failure, never a hole in the report."""
    code, run, _ = gate(
        """
    @pytest.fixture
    def broken(): raise RuntimeError("no port")

    @pytest.fixture
    def leaves_rank():
        yield
        raise RuntimeError("a rank outlived its test")

    @requirement("ATT-01", "x")
    def test_call(): assert 1 == 2

    @requirement("ATT-02", "x")
    def test_setup(broken): pass

    @requirement("ATT-03", "x")
    def test_teardown(leaves_rank): pass
    """,
        *workers,
    )
    assert code == 1
    found = {r["id"]: (r["state"], r["actual"]) for r in run.records}
    assert found["ATT-01"] == (v.FAIL, "AssertionError: assert 1 == 2")
    assert found["ATT-02"] == (v.FAIL, "RuntimeError: no port")
    assert found["ATT-03"] == (v.FAIL, "at teardown: RuntimeError: a rank outlived its test")


@XDIST
def test_no_mark_hides_a_failure(gate, workers):
    """An xfail mark left in a suite would turn a must into something nobody sees."""
    body = '    @requirement("ATT-01", "x")\n    @pytest.mark.xfail\n    def test_xfail(): raise Violation("a", "b")\n'
    code, run, text = gate(body, *workers)
    assert (code, states(run)["ATT-01"]) == (1, v.FAIL)
    assert "1 failed, 4 passed" in text


@XDIST
def test_stopped_run_is_incomplete(gate, workers):
    """With -x the rest was never tried; what failed until then is still told."""
    body = '@requirement("ATT-01", "x")\n    def test_a(): raise Violation("a", "b")\n'
    more = '\n    @requirement("ATT-02", "x")\n    @pytest.mark.parametrize("n", range(60))\n    def test_b(n): pass\n'
    code, run, text = gate("    " + body + more, "-x", *workers, core=False)
    assert code != 0
    assert run.footer["verdict"] == v.INCOMPLETE
    assert any("did not finish" in reason for reason in run.footer["reasons"])
    assert any("ATT-01" in reason for reason in run.footer["reasons"])
    assert "verdict: INCOMPLETE" in text


def test_crashed_worker_is_incomplete(gate):
    """A worker that dies takes a test with it; the others' green must not cover for it."""
    body = '@requirement("ATT-01", "x")\n    def test_dies(): os._exit(0)\n'
    code, run, _ = gate("    " + body, "-n", "2")
    assert (code, run.footer["verdict"]) == (1, v.INCOMPLETE)
    assert any("crashed while running" in reason and "test_dies" in reason for reason in run.footer["reasons"])


def test_crash_without_xdist_leaves_no_verdict(gate, pytester):
    """Yesterday's green file must not stand when today's run died before it could write."""
    assert gate("")[0] == 0
    code, run, _ = gate('    @requirement("ATT-01", "x")\n    def test_dies(): os._exit(0)\n', alone=True)
    assert code == 0  # os._exit(0) cannot be seen from inside; the missing file is what tells
    assert run is None


@pytest.mark.parametrize("code", [0, 3])
def test_exit_called_by_a_test_is_incomplete(gate, code):
    """`pytest.exit` with code 0 would end the gate green with tests untried."""
    ret, run, _ = gate(
        f'    @requirement("ATT-01", "x")\n    def test_exits(): pytest.exit("enough", returncode={code})\n'
    )
    assert ret != 0
    assert run.footer["verdict"] == v.INCOMPLETE


@XDIST
def test_interrupt_is_incomplete(gate, workers):
    """Ctrl-C half way leaves a report, and it must say that it is half a report."""
    ret, run, _ = gate(
        '    @requirement("ATT-01", "x")\n    def test_i(): raise KeyboardInterrupt\n', *workers, alone=True
    )
    assert ret != 0
    assert run.footer["verdict"] == v.INCOMPLETE


@XDIST
def test_suite_that_cannot_be_collected_is_incomplete(gate, workers):
    """A suite file with a broken import runs no tests; continuing past it must not be green."""
    ret, run, _ = gate("    raise RuntimeError('no')\n", "--continue-on-collection-errors", *workers)
    assert ret != 0
    assert run.footer["verdict"] in (v.INCOMPLETE, v.INCONCLUSIVE)
    assert any("could not be collected" in reason for reason in run.footer["reasons"])


@XDIST
@pytest.mark.parametrize("args", [("-k", "nothing_is_called_this"), ("--setup-only",), ("-k", "test_pg or test_col")])
def test_what_was_not_run_is_not_green(gate, workers, args):
    """Zero tests, tests only set up, and a core area left out: three ways to a green that tested nothing."""
    code, run, text = gate("", *args, *workers)
    assert code == 1
    assert run.footer["verdict"] == (v.INCOMPLETE if "--setup-only" in args else v.INCONCLUSIVE)
    assert f"verdict: {run.footer['verdict']}" in text


def test_one_rank_is_not_the_core(gate):
    """A gate of a distributed trainer that only ever started one rank has tested nothing distributed."""
    one = CORE.replace("[2, 3]", "[1]")
    assert one != CORE
    code, run, _ = gate(one, core=False)
    assert (code, run.footer["verdict"]) == (1, v.INCONCLUSIVE)
    assert "in PG" in run.footer["reasons"][0]


@XDIST
def test_selection_is_told(gate, workers):
    """A green over a hand-picked part must show that it is one."""
    code, run, _ = gate('    @requirement("ATT-01", "x")\n    def test_bad(): assert 0\n', "-k", "not bad", *workers)
    assert (code, run.header["deselected"], run.header["collected"]) == (0, 1, 4)


@XDIST
def test_failing_helper_is_not_green(gate, workers):
    """A plain test that fails makes pytest red; the verdict must not say PASS beside it."""
    code, run, _ = gate("    def test_helper(): assert 0\n", *workers)
    assert (code, run.footer["verdict"]) == (1, v.INCOMPLETE)
    assert any("test_helper failed and is not a requirement" in reason for reason in run.footer["reasons"])


@XDIST
def test_text_from_a_rank_cannot_break_the_run(gate, workers):
    """A rank's output may hold colour codes, lone surrogates and megabytes; none may crash a worker or the report."""
    code, run, _ = gate(
        """
    @requirement("ATT-01", "x")
    def test_bad(): raise Violation("\\x1b[31mred\\x1b[0m", "lone \\udc80", detail="x" * 1_000_000)
    """,
        *workers,
    )
    assert (code, run.footer["verdict"]) == (1, v.FAIL)
    record = next(r for r in run.records if r["id"] == "ATT-01")
    assert (record["expected"], record["actual"]) == ("red", "lone ?")
    assert len(record["detail"]) < 30_000


def test_grouped_tests_keep_a_node_id_that_runs_again(gate):
    """With --dist loadgroup xdist renames tests; a repro line with such a name selects nothing."""
    code, run, _ = gate(
        '    @pytest.mark.xdist_group("g")\n    @requirement("ATT-01", "x")\n    def test_g(): pass\n',
        *("-n", "2", "--dist", "loadgroup"),
    )
    assert (code, run.footer["verdict"]) == (0, v.PASS)
    assert next(r["nodeid"] for r in run.records if r["id"] == "ATT-01") == "suites/test_it.py::test_g"


def test_collect_only_keeps_the_last_verdict(gate, pytester):
    """Listing the tests is not a run: it must neither be red nor delete a report."""
    assert gate("")[0] == 0
    for option in ("--collect-only", "--fixtures"):
        code, run, text = gate("", option)
        assert (code, run.footer["verdict"]) == (0, v.PASS)
        assert "verdict:" not in text


def test_no_value_left_is_not_tested(gate):
    """World sizes that leave a requirement none to run at must show it as untested, not drop it."""
    code, run, _ = gate(
        '    @requirement("ATT-01", "x")\n    @pytest.mark.parametrize("size", [])\n    def test_none(size): pass\n'
    )
    record = next(r for r in run.records if r["id"] == "ATT-01")
    assert (code, record["state"], record["params"]) == (0, v.NOT_TESTED, {})


def test_gate_out(gate, pytester):
    """Two gates in one CI job write to folders of their own."""
    assert gate("", "--gate-out", "elsewhere/a")[:2] == (0, None)
    lines = (pytester.path / "elsewhere" / "a" / "verdict.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["verdict"] == v.PASS


def test_other_tests_are_left_alone(gate, pytester):
    """Running the project's own tests must not delete a gate's verdict or be judged as one."""
    assert gate("")[0] == 0
    pytester.makepyfile(test_other="def test_other(): pass")
    result = pytester.runpytest_inprocess("test_other.py")
    assert result.ret == 0
    assert "verdict:" not in result.stdout.str()
    assert (pytester.path / "reports" / "out" / "gate" / "verdict.jsonl").exists()
