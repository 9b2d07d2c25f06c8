"""Finding a nanochat in a folder, and one clear line for every folder and option that cannot be meant."""

import re
import subprocess
import sys

import pytest

from nanochat_gate import options, standins, target
from nanochat_gate.server import ROOT


def checkout(folder, package="nanochat", files=("__init__.py", "common.py", "dataloader.py"), pyproject=""):
    (folder / package).mkdir(parents=True)
    for name in files:
        (folder / package / name).touch()
    if pyproject:
        (folder / "pyproject.toml").write_text(pyproject)
    return folder


def test_reference_is_a_target():
    """The default target is this repo; it must be found as any other."""
    found = target.find(ROOT)
    assert (found.package, found.claims) == ("nanochat", ("cpu", "cuda"))


def test_nanochat_in_src(tmp_path):
    """Many forks move to a src layout."""
    checkout(tmp_path / "src")
    assert target.find(tmp_path).import_root == tmp_path / "src"


def test_renamed_package(tmp_path):
    """A fork that renamed its package must be judged, not our reference in its place."""
    checkout(tmp_path, "mychat")
    (tmp_path / "scripts").mkdir()
    assert target.find(tmp_path).package == "mychat"


def test_fork_says_what_it_is(tmp_path):
    """Several candidates need the fork's word, and it must be heard whole."""
    said = '[tool.nanochat-gate]\npackage = "b"\nclaims = ["cpu"]\nenvironment = {MODE = 1}\nworking-directory = "."\n'
    checkout(tmp_path, "a")
    checkout(tmp_path, "b", pyproject=said)
    found = target.find(tmp_path)
    assert (found.package, found.claims, found.environment) == ("b", ("cpu",), {"MODE": "1"})
    assert found.cwd == str(tmp_path)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "absent", "no such folder"),
        (lambda path: path, "no nanochat in"),
        (lambda path: [checkout(path, "a"), checkout(path, "b")][0], "several folders that could be nanochat"),
        (lambda path: checkout(path, pyproject="[tool.nanochat-gate]\npackage = 'gone'"), "names package 'gone'"),
        (lambda path: checkout(path, pyproject="[tool.nanochat-gate]\nclaim = ['cpu']"), "unknown keys claim"),
        (lambda path: checkout(path, pyproject="[tool.nanochat-gate]\nclaims = ['tpu']"), "unknown claim tpu"),
        (lambda path: checkout(path, pyproject="[tool.nanochat-gate]\nclaims = 'cpu'"), "claims is a list"),
        (lambda path: checkout(path, pyproject="[tool.nanochat-gate]\nenvironment = 3"), "environment is a table"),
        (lambda path: checkout(path, pyproject="[tool.nanochat-gate]\npackage = 3"), "package is a string"),
        (
            lambda path: checkout(path, pyproject="[tool.nanochat-gate]\nworking-directory = 'nowhere'"),
            "'nowhere' is no folder of the checkout",
        ),
        (lambda path: checkout(path, pyproject="tool = 3"), "tool is a table, not 3"),
        (lambda path: checkout(path, pyproject="[tool]\nnanochat-gate = 3"), "nanochat-gate is a table, not 3"),
        (lambda path: checkout(path, pyproject="[tool."), "not valid TOML"),
    ],
)
def test_what_is_no_target(tmp_path, make, words):
    """A traceback in place of a sentence sends a maintainer to our source instead of to their folder."""
    with pytest.raises(target.TargetError, match=re.escape(words)):
        target.find(make(tmp_path))


@pytest.mark.parametrize("text", ["0", "2,x", "-1", "99", "", "1.5"])
def test_world_sizes_that_are_none(text):
    """A world size of 0 that is silently dropped leaves a green run that tested nothing."""
    with pytest.raises(pytest.UsageError, match="world size"):
        options._sizes(text)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--nanochat", "/nowhere"], "no such folder"),
        (["--world-sizes", "0"], "is no world size"),
        (["--nanochat", ""], "--nanochat is empty"),
        (["--claim", ""], "--claim: no device given"),
        (["--backends", "mpi"], "unknown backend mpi"),
        (["--claim", "tpu"], "unknown claim tpu"),
        (["--backends", ","], "no backend given"),
        (["--require", "tpu"], "unknown 'tpu'"),
        (["--require", ""], "unknown ''"),
        (["--pass-env", "A=B"], "'A=B' is no variable's name"),
        (["--gate-out", "README.md"], "README.md is a file"),
        (["--level", "may"], "invalid choice"),
    ],
)
def test_command_line_refuses_in_one_line(args, words):
    """Exit code 4 and one line: a CI job must tell a typing error from a verdict."""
    command = [sys.executable, "-m", "pytest", "suites", *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    errors = [line for line in done.stderr.splitlines() if words in line]
    assert len(errors) == 1
    assert "Traceback" not in done.stderr + done.stdout


def test_fork_before_suites_is_refused(tmp_path):
    """pytest would load the fork's conftest.py in its own process and take its settings for ours."""
    fork = checkout(tmp_path / "fork")
    (fork / "conftest.py").write_text("print('the fork speaks')")
    command = [sys.executable, "-m", "pytest", "--nanochat", str(fork), "suites"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4
    assert f"--nanochat={fork}" in done.stderr


def test_missing_packages_get_stand_ins_and_leave_no_trace(tmp_path, monkeypatch):
    """A stand-in that stayed would turn an optional import elsewhere into a present one."""
    package = tmp_path / "ownpackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "tok.py").write_text("from absent_one.sub import Thing\nimport absent_two\n")
    (package / "engine.py").write_text(
        "from ownpackage.tok import Thing\n"
        "try:\n    import absent_kernel\n    KERNEL = True\nexcept ImportError:\n    KERNEL = False\n"
        "class KVCache: pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    module = standins.import_without("ownpackage.engine", "ownpackage")
    assert module.KVCache
    assert module.KERNEL is False
    with pytest.raises(ImportError, match="stood in"):
        module.Thing()
    assert not [name for name in sys.modules if name.startswith(("absent_", "ownpackage."))]


def test_own_missing_module_gets_no_stand_in(tmp_path, monkeypatch):
    """A fork that imports a module of its own that does not exist is broken, whatever else is installed."""
    package = tmp_path / "brokenpackage"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("from brokenpackage.gone import thing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError):
        standins.import_without("brokenpackage.engine", "brokenpackage")


def test_no_fork_is_named():
    """A verdict must come from the requirements, not from knowing whose tree it is."""
    names = re.compile(r"karpathy|dicklesworthstone|bio_inspired|\b[0-9a-f]{7}\b(?<![0-9]{7})", re.IGNORECASE)
    for folder in ("nanochat_gate", "suites"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found = [line for line in file.read_text().splitlines() if names.search(line)]
            assert not found, f"{file.name}: {found[0]}"
