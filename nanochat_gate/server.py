"""The preloaded process that forks ranks: torch is imported once, a world of ranks then starts in milliseconds.

One server serves a whole test run. Each client connection owns one group of processes (the ranks of a world, or one
command such as torchrun); when the connection closes, for whatever reason, that group and all its descendants are
killed. The server never initialises CUDA and never runs an operator: both would start threads that a fork loses.

    client -> server   {"op": "fork", "ranks": [spec, ...]} with one control socket a rank (SCM_RIGHTS)
                       {"op": "exec", "argv": [...], "env": {...}, "cwd": ..., "log": ...}
                       {"op": "signal", "rank": i, "signal": n}
    server -> client   {"event": "started", "pids": [...]}
                       {"event": "exit", "rank": i, "status": n}   n as subprocess has it: -9 is SIGKILL
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import importlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
MAX_RANKS = 64
END = 5.0  # s that killed processes get to be gone before the server itself ends
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def isolate() -> None:
    """Import what rank functions use from this project, then take the project's root off sys.path.

    The root also holds our reference `nanochat`; with it on the path a half-renamed fork would import ours and pass.
    """
    sys.path.insert(0, str(ROOT))
    import nanochat_gate.rank  # noqa: F401
    import suites  # noqa: F401

    hidden = {str(ROOT), str(ROOT / "nanochat_gate"), ""}
    sys.path[:] = [entry for entry in sys.path if entry not in hidden and not _same(entry, ROOT)]


def _same(entry: str, folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(entry, folder)
    return False


def preload() -> None:
    """Everything a target is likely to import, so that a forked rank finds it in memory."""
    import numpy  # noqa: F401
    import torch
    import torch._dynamo
    import torch.distributed  # noqa: F401

    for name in ("pyarrow.parquet", "rustbpe", "tiktoken"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    isolate()


class _Group:
    """The processes that one connection owns."""

    def __init__(self, sock: socket.socket) -> None:
        from nanochat_gate.wire import Reader

        self.sock = sock
        self.reader = Reader(sock)
        self.pids: list[int] = []
        self.alive: set[int] = set()
        self.fds: list[int] = []


class Server:
    def __init__(self, address: str, parent: int) -> None:
        self.parent = parent
        self.selector = selectors.DefaultSelector()
        self.groups: dict[int, _Group] = {}
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Bound under another name first: a client that finds the address must find somebody listening there.
        self.listener.bind(address + ".new")
        self.listener.listen(64)
        os.rename(address + ".new", address)
        self.wakeup, wake = socket.socketpair()
        for end in (self.wakeup, wake):
            end.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(self.wakeup, selectors.EVENT_READ)
        self.selector.register(parent, selectors.EVENT_READ)

    def serve(self) -> None:
        """Run until the process that started the server has gone."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    sock, _ = self.listener.accept()
                    self.groups[sock.fileno()] = _Group(sock)
                    self.selector.register(sock, selectors.EVENT_READ)
                elif key.fileobj is self.wakeup:
                    with contextlib.suppress(BlockingIOError):
                        self.wakeup.recv(4096)
                    self.reap()
                elif key.fileobj == self.parent:
                    self.end()
                    return
                elif key.fd in self.groups:
                    self.hear(self.groups[key.fd])

    def end(self) -> None:
        """Kill every group, and what its processes started while they were being killed."""
        for group in list(self.groups.values()):
            self.drop(group)
        deadline = time.monotonic() + END
        while time.monotonic() < deadline:
            self.reap()
            try:
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            time.sleep(0.01)

    def hear(self, group: _Group) -> None:
        fds = array.array("i")
        size = fds.itemsize
        try:
            data, ancillary, _, _ = group.sock.recvmsg(1 << 20, socket.CMSG_SPACE(MAX_RANKS * size))
        except ConnectionError:
            data, ancillary = b"", []
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % size])
        group.fds += fds
        if not data:
            self.drop(group)
            return
        group.reader._buffer += data
        while (got := group.reader.next()) is not None:
            request = got[0]
            if request["op"] == "fork":
                group.pids = [self.fork(spec, group.fds[i], group) for i, spec in enumerate(request["ranks"])]
                for fd in group.fds:
                    os.close(fd)
                group.fds = []
                self.started(group)
            elif request["op"] == "exec":
                group.pids = [self.execute(request)]
                self.started(group)
            elif request["op"] == "signal" and request["rank"] in group.alive:
                os.kill(group.pids[request["rank"]], request["signal"])

    def started(self, group: _Group) -> None:
        group.alive = set(range(len(group.pids)))
        self.tell(group, {"event": "started", "pids": group.pids})
        self.reap()

    def tell(self, group: _Group, event: dict[str, Any]) -> None:
        from nanochat_gate.wire import frame

        with contextlib.suppress(OSError):
            group.sock.sendall(frame(event))

    def fork(self, spec: dict[str, Any], control: int, group: _Group) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            own = os.dup(control)
            self.selector.close()
            for sock in (self.listener, self.wakeup, self._wake, *(g.sock for g in self.groups.values())):
                sock.close()
            for fd in group.fds:
                os.close(fd)
            self._redirect(spec["log"])
            from nanochat_gate.rank import serve

            code = serve(socket.socket(fileno=own), spec)
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)

    @staticmethod
    def _redirect(log: str) -> None:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (out, 1), (out, 2)):
            os.dup2(source, target)

    @staticmethod
    def execute(request: dict[str, Any]) -> int:
        with open(request["log"], "ab") as log:
            # Reaped by self.reap, so that Popen's own bookkeeping is left out.
            process = subprocess.Popen(
                request["argv"],
                env=request["env"],
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        process.returncode = 0
        return process.pid

    def reap(self) -> None:
        """Report every process that has ended; kill what a dead one left behind."""
        ended = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            ended = True  # also one of a dropped group, which may have started a child while it was being killed
            for group in self.groups.values():
                if pid in group.pids and group.pids.index(pid) in group.alive:
                    rank = group.pids.index(pid)
                    group.alive.discard(rank)
                    self.tell(group, {"event": "exit", "rank": rank, "status": os.waitstatus_to_exitcode(status)})
        if ended:
            self._kill_orphans()

    def _kill_orphans(self) -> None:
        import psutil

        known = {pid for group in self.groups.values() for pid in group.pids}
        for child in psutil.Process().children():
            if child.pid not in known:
                _kill_tree(child.pid)

    def drop(self, group: _Group) -> None:
        self.selector.unregister(group.sock)
        self.groups.pop(group.sock.fileno())
        group.sock.close()
        for fd in group.fds:
            os.close(fd)
        for rank in group.alive:
            _kill_tree(group.pids[rank])


def _kill_tree(pid: int) -> None:
    """SIGKILL a child and its descendants, whatever sessions they moved to."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for victim in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                victim.kill()


def main() -> None:
    address, parent = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    preload()
    Server(address, parent).serve()
    os._exit(0)  # torch takes a second or more to be taken down, and pytest waits for this process


if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if entry and not _same(entry, ROOT / "nanochat_gate")]
    sys.path.insert(0, str(ROOT))
    main()
