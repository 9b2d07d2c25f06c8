"""Ranks as pytest sees them: start a world, run a function on every rank, time out, clean up.

A result counts only if every rank answered for this very call. A rank that dies is seen through the fork server the
moment it ends and is named first; what then happens to the others is folded under it. A world in which nobody has
used the processor for STALL seconds hangs: the stack of every rank and the collective it is in are shown.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch._C._distributed_c10d import TCPStore

from nanochat_gate import environment, observe, wire
from nanochat_gate.requirement import Blocked
from nanochat_gate.server import ROOT, THREADS

STALL = 10.0  # s without processor time on any rank: nothing in a rank function waits that long for anything but ranks
LIMIT = 150.0  # s for one call, whatever it does; below pytest-timeout's 300 s
INITS = 4  # process groups that a rank function may make, one after another, in a world without one
START = 120.0  # s for the fork server to import torch on a busy machine
GRACE = 2.0  # s that the other ranks get once one has failed
os.environ.setdefault("RES_OPTIONS", environment.NO_NAME_SERVER)  # stores are made in this process too
_serial = itertools.count()


class Server:
    """The fork server of this run; started here, or reached at the address another process started it at.

    Starting returns at once: torch is imported while pytest collects, and `connect` waits for it.
    """

    def __init__(self, folder: Path, address: str = "") -> None:
        self.folder = folder
        self.address = address or str(folder / "server.sock")
        self._process: subprocess.Popen[bytes] | None = None
        if not address:
            self._start()

    def _start(self) -> None:
        read, self._lifeline = os.pipe()
        env = {**os.environ, **THREADS, "TORCHDYNAMO_DISABLE": "1"}
        with open(self.folder / "server.log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "nanochat_gate" / "server.py"), self.address, str(read)],
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[read],
                start_new_session=True,
            )
        os.close(read)

    def connect(self) -> socket.socket:
        """A connection of its own for one group of processes; Blocked when the server does not come up."""
        deadline = time.monotonic() + START
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(self.address)
                return sock
            except OSError as error:
                sock.close()
                ended = self._process is not None and self._process.poll() is not None
                if ended or time.monotonic() > deadline:
                    log = self.folder / "server.log"
                    tail = log.read_text(errors="replace")[-2000:] if log.exists() else ""
                    raise Blocked(f"the fork server cannot be reached ({error}): {tail}") from None
            time.sleep(0.05)

    def close(self) -> None:
        if self._process is not None:
            os.close(self._lifeline)
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


@dataclass(frozen=True)
class Spec:
    """What makes two worlds interchangeable.

    group: "target" (its compute_init, ours where that makes none), "provided" (ours), or None (no process group).
    lane:  "plain", "withheld" (with futures provided), or "withheld-native" (futures only where the backend has them).
    """

    target: str  # JSON of target.Target.for_ranks()
    size: int
    backend: str = "gloo"
    group: str | None = "target"
    torchrun: bool = True
    lane: str = "plain"
    env: tuple[tuple[str, str], ...] = ()


@dataclass
class Reply:
    """How one rank ended a call: `value` when ok, else `error` as rank.describe has it."""

    ok: bool
    value: Any = None
    error: dict[str, Any] | None = None


class World:
    def __init__(self, server: Server, spec: Spec, base_env: dict[str, str]) -> None:
        self.spec = spec
        self.server = server
        self.folder = Path(tempfile.mkdtemp(prefix=f"world{next(_serial)}-", dir=server.folder))
        self.spent = ""  # why this world is not to be used again
        target = json.loads(spec.target)
        env = {**base_env, **dict(target["environment"]), **dict(spec.env)}
        env |= {"HOME": str(self.folder), "NANOCHAT_BASE_DIR": str(self.folder / "base"), "TMPDIR": str(self.folder)}
        # env:// rendezvous on a store that has served before hangs, so every init of this world gets a fresh one.
        inits = 1 if spec.group else INITS
        self.stores = [TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False) for _ in range(inits)]
        ports = [store.port for store in self.stores]
        if spec.torchrun:
            env |= {
                "WORLD_SIZE": str(spec.size),
                "LOCAL_WORLD_SIZE": str(spec.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports[0]),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_RUN_ID": self.folder.name,
                "GROUP_RANK": "0",
            }
        self.sockets, theirs, ranks = [], [], []
        for rank in range(spec.size):
            ours, other = socket.socketpair()
            ours.setblocking(False)
            self.sockets.append(ours)
            theirs.append(other)
            trace = self._file(rank, "trace")
            trace.touch()
            os.truncate(trace, observe.TRACE_BYTES)
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if spec.torchrun else {}
            ranks.append(
                {
                    "rank": rank,
                    "size": spec.size,
                    "backend": spec.backend,
                    "group": spec.group,
                    "lane": spec.lane,
                    "target": target,
                    "ports": ports,
                    "env": env | own,
                    "cwd": target["cwd"] or str(self.folder),
                    "log": str(self._file(rank, "log")),
                    "trace": str(trace),
                    "stacks": str(self._file(rank, "stacks")),
                }
            )
        self.readers = [wire.Reader(sock) for sock in self.sockets]
        self.connection = server.connect()
        socket.send_fds(
            self.connection, [wire.frame({"op": "fork", "ranks": ranks})], [sock.fileno() for sock in theirs]
        )
        self.events = wire.Reader(self.connection)
        started = self.events.wait()
        for sock in theirs:
            sock.close()
        if started is None:
            raise Blocked("the fork server ended; its log is in " + str(server.folder / "server.log"))
        self.pids: list[int] = started[0]["pids"]
        self.connection.setblocking(False)
        self.exited: dict[int, int] = {}

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank{rank}.{kind}"

    def call(self, file: str, name: str, args: list[Any], call: str, limit: float = LIMIT) -> list[Reply]:
        """Run a rank function on every rank and wait for all of them; a Reply per rank, in order of rank."""
        size = self.spec.size
        message = wire.frame({"call": call, "file": file, "name": name, "args": args})
        for sock in self.sockets:
            with contextlib.suppress(BrokenPipeError, ConnectionError):
                sock.sendall(message)
        replies: dict[int, Reply] = {}
        self.first: int | None = None  # the rank that failed first
        self.died = False
        watch = _Watch(self.pids, limit)
        with selectors.DefaultSelector() as selector:
            for rank, sock in enumerate(self.sockets):
                selector.register(sock, selectors.EVENT_READ, rank)
            selector.register(self.connection, selectors.EVENT_READ, None)
            while len(replies) < size:
                for key, _ in selector.select(0.25):
                    if key.data is None:
                        self._hear_server(call, replies, selector)
                    else:
                        self._hear_rank(key.data, call, replies, selector)
                if len(replies) < size and (why := watch.over(failed=self.first is not None)):
                    self._give_up(why, replies)
        return [replies[rank] for rank in range(size)]

    def _hear_rank(self, rank: int, call: str, replies: dict[int, Reply], selector: selectors.BaseSelector) -> None:
        self.readers[rank].fill()
        self._take(rank, call, replies)
        if self.readers[rank].closed:
            selector.unregister(self.sockets[rank])

    def _take(self, rank: int, call: str, replies: dict[int, Reply]) -> None:
        while (got := self.readers[rank].next()) is not None:
            header, blob = got
            if header.get("call") != call:
                continue  # an answer to a call that was given up on is no answer to this one
            if header["ok"]:
                replies[rank] = Reply(True, wire.unpack(blob))
                self.spent = self.spent or header["changed"]
            else:
                replies[rank] = Reply(False, error=header["error"])
                self._failed(rank, "a call failed")

    def _hear_server(self, call: str, replies: dict[int, Reply], selector: selectors.BaseSelector) -> None:
        self.events.fill()
        while (got := self.events.next()) is not None:
            event = got[0]
            rank, status = event["rank"], event["status"]
            self.exited[rank] = status
            self.spent = "a rank ended"
            with contextlib.suppress(BlockingIOError):
                self.readers[rank].fill()  # an answer sent just before the end still counts
            self._take(rank, call, replies)
            if rank not in replies:
                replies[rank] = Reply(False, error={"kind": "error", "text": _died(status), "where": ""})
                self._failed(rank, "a rank ended")
                if not self.died:
                    self.first = rank  # what others say of a lost connection may be heard before its cause
                self.died = True
        if self.events.closed:
            selector.unregister(self.connection)
            self._give_up("the fork server ended", replies)

    def _failed(self, rank: int, why: str) -> None:
        self.spent = why
        if self.first is None:
            self.first = rank

    def _give_up(self, why: str, replies: dict[int, Reply]) -> None:
        """Take the stacks of every rank that has not answered, then kill the world."""
        waiting = [rank for rank in range(self.spec.size) if rank not in replies]
        for rank in waiting:
            with contextlib.suppress(OSError):
                self.connection.send(wire.frame({"op": "signal", "rank": rank, "signal": int(signal.SIGUSR1)}))
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and not all(self._stack(rank) for rank in waiting):
            time.sleep(0.02)
        for rank in waiting:
            last = self.trace(rank)[-1:]
            text = f"{why}; its last collective: {last[0] if last else 'none'}"
            error = {"kind": "error", "text": text, "where": "", "traceback": self._stack(rank), "hung": True}
            replies[rank] = Reply(False, error=error)
            self._failed(rank, why)
        self.close()

    def _stack(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return self._file(rank, "stacks").read_text(errors="replace")
        return ""

    def trace(self, rank: int) -> list[str]:
        """The collectives rank issued in its last call, oldest first."""
        return observe.read_trace(str(self._file(rank, "trace")))

    def log(self, rank: int, lines: int = 20) -> str:
        """The tail of what rank printed."""
        with contextlib.suppress(OSError):
            return "\n".join(self._file(rank, "log").read_text(errors="replace").splitlines()[-lines:])
        return ""

    def close(self) -> None:
        """Kill the ranks and all they started. The server does it as the connection closes."""
        self.spent = self.spent or "closed"
        for sock in (*self.sockets, self.connection):
            sock.close()
        self.stores.clear()


class _Watch:
    """Tells when a call has to be given up: a limit, a stall, or the grace after a first failure.

    Costs nothing on a call that is over before the first look: reading the process table takes milliseconds.
    """

    LOOK = 0.5  # s between looks

    def __init__(self, pids: list[int], limit: float) -> None:
        self.pids = pids
        self.limit = limit
        self.start = self.looked = time.monotonic()
        self.processes: list[psutil.Process] | None = None
        self.used = self.moved = self.failed_at = 0.0

    def _used(self) -> float:
        """Processor seconds of all ranks and their children so far."""
        used = 0.0
        for process in self.processes or ():
            with contextlib.suppress(psutil.Error):
                for one in (process, *process.children(recursive=True)):
                    times = one.cpu_times()
                    used += times.user + times.system
        return used

    def over(self, failed: bool) -> str:
        """Why to give up now, or ""."""
        now = time.monotonic()
        if failed:
            self.failed_at = self.failed_at or now
            if now - self.failed_at > GRACE:
                return "still running when another rank had failed"
        if now - self.start > self.limit:
            return f"no answer within {self.limit:.0f} s"
        if now - self.looked < self.LOOK:
            return ""
        self.looked = now
        if self.processes is None:
            self.processes, self.moved = [], now
            for pid in self.pids:
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.processes.append(psutil.Process(pid))
        used = self._used()
        if used - self.used > 0.05:
            self.used, self.moved = used, now
        if now - self.moved > STALL:
            return f"hangs: no rank used the processor for {STALL:.0f} s"
        return ""


def _died(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"
        more = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the process was ended by {name}{more}"
    return f"the process ended itself with exit code {status}"


class Pool:
    """Worlds of one pytest process, reused while nothing has changed them."""

    KEEP = 6

    def __init__(self, server: Server, base_env: dict[str, str]) -> None:
        self.server = server
        self.base_env = base_env
        self.worlds: dict[Spec, World] = {}

    def take(self, spec: Spec, fresh: bool = False) -> World:
        world = self.worlds.pop(spec, None)
        if world is not None and (fresh or world.spent):
            world.close()
            world = None
        if world is None:
            world = World(self.server, spec, self.base_env)
        if fresh:
            world.spent = "made for one test"
        self.worlds[spec] = world
        while len(self.worlds) > self.KEEP:
            self.worlds.pop(next(iter(self.worlds))).close()
        return world

    def close(self) -> None:
        for world in self.worlds.values():
            world.close()
        self.worlds.clear()
