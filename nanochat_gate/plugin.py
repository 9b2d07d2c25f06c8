"""pytest hooks and fixtures: starts the fork server, looks at the target, hands ranks to tests."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

from nanochat_gate import environment, facts, judge, launch, options, recording, wire, world
from nanochat_gate.facts import Facts
from nanochat_gate.requirement import Blocked, NotTested
from nanochat_gate.server import ROOT
from nanochat_gate.target import Target

GATE: pytest.StashKey[Gate] = pytest.StashKey()


class Gate:
    """What one pytest process knows of the run: the target, the server, its worlds, the facts."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        said = options.check(config)
        given = getattr(config, "workerinput", {})
        self.target: Target = said["target"]
        self.claims: tuple[str, ...] | None = said["claims"]
        self.world_sizes: tuple[int, ...] = said["world_sizes"]
        self.backends: tuple[str, ...] = said["backends"] or (
            ("gloo", "nccl") if torch.cuda.device_count() else ("gloo",)
        )
        self.env = environment.base(config.getoption("pass_env"))
        self.worker: str = given.get("workerid", "main")
        self.folder = Path(given.get("gate_folder", ""))
        # The fault catalogue gates many targets with one server, named in the environment.
        self.address: str = given.get("gate_address", "") or os.environ.get("NANOCHAT_GATE_SERVER", "")
        self._facts: Facts | None = None
        self._server: world.Server | None = None
        self._pool: world.Pool | None = None
        self._owns_folder = not given
        self.calls = 0

    @property
    def server(self) -> world.Server:
        if self._server is None:
            if not self.folder.name:
                self.folder = Path(tempfile.mkdtemp(prefix="gate-"))
            self._server = world.Server(self.folder, self.address)
            self.address = self._server.address
        return self._server

    @property
    def pool(self) -> world.Pool:
        if self._pool is None:
            self._pool = world.Pool(self.server, self.env)
        return self._pool

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            text = self.shared("facts", lambda: facts.gather(self.target, self.pool, self.claims).to_json())
            self._facts = Facts.from_json(text)
            self.config.stash[recording.CLAIMS] = frozenset(self._facts.claims)
        return self._facts

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """`make()` once for the whole run, whichever worker comes first; the others read what it made."""
        assert self.server
        file = self.folder / f"shared-{name}.pt"
        with FileLock(str(file) + ".lock"):
            if not file.exists():
                file.write_bytes(wire.pack(make()))
        return wire.unpack(file.read_bytes())

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._server is not None:
            self._server.close()
        if self._owns_folder and self.folder.name:
            shutil.rmtree(self.folder, ignore_errors=True)


class Ranks:
    """Runs rank functions; the fixture `ranks`."""

    def __init__(self, gate: Gate, nodeid: str) -> None:
        self.gate = gate
        self.nodeid = nodeid

    @property
    def facts(self) -> Facts:
        return self.gate.facts

    def __call__(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int,
        backend: str = "gloo",
        group: str | None = "target",
        torchrun: bool = True,
        lane: str = "plain",
        env: dict[str, str] | None = None,
        fresh: bool = False,
        limit: float = world.LIMIT,
    ) -> list[Any]:
        """Run `function(rank, *args)` on each of `size` ranks; their results in order of rank.

        args:     JSON values.
        group:    "target": the group the target makes, ours where it makes none; "provided": ours; None: no group.
        torchrun: whether ranks see torchrun's environment variables.
        lane:     "plain", or "withheld": results of collectives handed over at the wait (see observe).
        env:      further environment variables; each distinct environment has worlds of its own.
        fresh:    new processes for this call, and none after it: for a function that patches or breaks something.
        limit:    seconds this call may take at most.

        Raises Violation (naming the first failing rank), Unsupported, Blocked or NotTested.
        """
        world_ = self._world(size, backend, group, torchrun, lane, env or {}, fresh)
        gate = self.gate
        gate.calls += 1
        file = function.__code__.co_filename
        call = f"{gate.worker}/{gate.calls}/{self.nodeid}"
        replies = world_.call(file, function.__name__, list(args), call, limit)
        repro = launch.repro_lines(gate.target, self.nodeid, function, args, size, lane)
        return judge.judge(world_, replies, repro)

    def _world(
        self,
        size: int,
        backend: str,
        group: str | None,
        torchrun: bool,
        lane: str,
        env: dict[str, str],
        fresh: bool,
    ) -> world.World:
        gate = self.gate
        if backend == "nccl" and torch.cuda.device_count() < size:
            have = torch.cuda.device_count()
            raise NotTested(f"NCCL at {size} ranks needs {size} GPUs; this machine has {have}", lacks="nccl")
        if gate.facts.blocked:
            raise Blocked(gate.facts.blocked)
        if group == "target" and backend == "gloo":
            group = gate.facts.group
        if lane == "withheld":
            lane = gate.facts.withheld_lane
        spec = world.Spec(
            json.dumps(gate.target.for_ranks()), size, backend, group, torchrun, lane, tuple(sorted(env.items()))
        )
        return gate.pool.take(spec, fresh)

    def single(self, function: Callable[..., Any], *args: Any, backend: str = "gloo", **kwargs: Any) -> Any:
        """The single-process baseline: one rank, with a process group only where the target needs one.

        Where the target's step cannot do without futures that the backend lacks, the baseline is given them.
        Run once for the whole session, whichever worker asks first, so `function` must be deterministic.
        """
        alone = self.facts.alone
        group = "target" if alone else None
        lane = "withheld" if alone and self.facts.step != "ok" else "plain"

        def run() -> Any:
            return self(function, *args, size=1, backend=backend, group=group, torchrun=alone, lane=lane, **kwargs)[0]

        said = repr((function.__module__, function.__qualname__, args, backend, sorted(kwargs.items())))
        return self.gate.shared(hashlib.sha256(said.encode()).hexdigest()[:16], run)

    def torchrun(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int,
        group: str | None = "target",
        lane: str = "plain",
        **kwargs: Any,
    ) -> list[Any]:
        """Like a call, in processes started by real torchrun (seconds, not milliseconds)."""
        if self.facts.blocked:
            raise Blocked(self.facts.blocked)
        group = self.facts.group if group == "target" else group
        lane = self.facts.withheld_lane if lane == "withheld" else lane
        return launch.torchrun(self.gate, self.nodeid, function, args, size, group, lane, **kwargs)


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    options.add(parser)
    _keep_out_foreign_conftests(pluginmanager)


def _keep_out_foreign_conftests(pluginmanager: Any) -> None:
    """pytest meets `--nanochat PATH` before it knows the option, takes PATH for a test folder and loads its conftest.

    That would run the fork's code in pytest's own process. Those still to come are kept out here; one that came
    first (`--nanochat PATH` before `suites/`) is refused in pytest_configure.
    """
    load = pluginmanager._loadconftestmodules

    def load_ours(path: Path, *args: Any, **kwargs: Any) -> None:
        if ROOT in (path, *path.parents):
            load(path, *args, **kwargs)

    pluginmanager._loadconftestmodules = load_ours


def pytest_configure(config: pytest.Config) -> None:
    foreign = [
        name
        for name, _ in config.pluginmanager.list_name_plugin()
        if Path(name).name == "conftest.py" and ROOT not in Path(name).parents
    ]
    if config.getoption("nanochat") and (foreign or config.rootpath != ROOT):
        raise pytest.UsageError(
            f"pytest took the target for a test folder (its root is {config.rootpath}); write it as one word: "
            f"--nanochat={config.getoption('nanochat')}"
        )
    # What is judged here is small, and several workers share the cores with the ranks.
    torch.set_num_threads(1)
    config.stash[GATE] = Gate(config)


def _gates(config: pytest.Config) -> bool:
    """Whether this run judges a target: suites/ is in what was asked for."""
    suites = ROOT / "suites"
    for arg in config.args:
        path = (config.invocation_params.dir / arg.split("::")[0]).resolve()
        if path == suites or suites in path.parents or path in suites.parents:
            return not config.option.collectonly
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the server before xdist starts its workers, so that both import torch at the same time."""
    config = session.config
    if _gates(config):
        assert config.stash[GATE].server


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    gate = config.stash[GATE]
    if _gates(config) and not hasattr(config, "workerinput"):
        config.stash[recording.HEADER] = header(gate, config)


def header(gate: Gate, config: pytest.Config) -> dict[str, Any]:
    """What was judged, and on what; goes into verdict.jsonl's first line."""
    commit, dirty = gate.target.commit()
    return {
        "target": gate.target.root.name,
        "path": str(gate.target.root),
        "package": gate.target.package,
        "commit": commit,
        "dirty": dirty,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backends": list(gate.backends),
        "cpu": f"{_processor()}, {os.cpu_count()} cores",
        "gpus": torch.cuda.device_count(),
        "options": {
            "world_sizes": list(gate.world_sizes),
            "level": config.getoption("level"),
            "require": config.getoption("require"),
            "claim": list(gate.claims) if gate.claims is not None else None,
        },
        "claims": list(gate.facts.claims),
        "facts": asdict(gate.facts),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers share the controller's server and folder."""
    gate = node.config.stash[GATE]
    assert gate.server
    node.workerinput |= {"gate_folder": str(gate.folder), "gate_address": gate.address}


def pytest_unconfigure(config: pytest.Config) -> None:
    gate = config.stash.get(GATE, None)
    if gate is not None:
        gate.close()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("requirement")
    if marker is None:
        return
    gate = metafunc.config.stash[GATE]
    if "backend" in metafunc.fixturenames:
        metafunc.parametrize("backend", gate.backends)
    if "size" in metafunc.fixturenames:
        wanted = marker.kwargs["sizes"] or (2, 3, 4)
        metafunc.parametrize("size", [size for size in wanted if size in gate.world_sizes])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what takes minutes, unless marks were asked for, or tests by name."""
    if config.option.markexpr or any("::" in arg for arg in config.args):
        return
    if slow := [item for item in items if item.get_closest_marker("slow")]:
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=slow)


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k PG-01` and `-m core` select by requirement."""
    marker = item.get_closest_marker("requirement")
    if marker is not None:
        item.extra_keyword_matches.add(marker.kwargs["id"])


@pytest.fixture(scope="session")
def gate(request: pytest.FixtureRequest) -> Gate:
    return request.config.stash[GATE]


@pytest.fixture
def ranks(gate: Gate, request: pytest.FixtureRequest) -> Ranks:
    return Ranks(gate, request.node.nodeid)
