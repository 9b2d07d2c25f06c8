"""Frames between pytest, the fork server and ranks: a JSON header and a blob of tensors.

A frame is two big-endian unsigned 32-bit lengths, the header as UTF-8 JSON, then the blob. Blobs are written by
`torch.save` and read with `weights_only=True`, so nothing a rank made is ever unpickled as code.
"""

from __future__ import annotations

import io
import json
import socket
import struct
from typing import Any

import torch

_LENGTHS = struct.Struct("!II")
CHUNK = 1 << 20


def pack(value: Any) -> bytes:
    """Tensors, numbers, strings, None, and lists, tuples and dicts of them, as bytes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(blob: bytes) -> Any:
    """The value `pack` was given; tensors come back on the CPU."""
    return torch.load(io.BytesIO(blob), weights_only=True, map_location="cpu")


def frame(header: dict[str, Any], blob: bytes = b"") -> bytes:
    head = json.dumps(header).encode()
    return _LENGTHS.pack(len(head), len(blob)) + head + blob


class Reader:
    """Whole frames out of a stream socket that may be non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.closed = False
        self._buffer = bytearray()

    def fill(self) -> None:
        """Take what is there (or block, on a blocking socket); sets `closed` when the other side has gone."""
        try:
            data = self.sock.recv(CHUNK)
        except BlockingIOError:
            return
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
        self._buffer += data

    def next(self) -> tuple[dict[str, Any], bytes] | None:
        """The next whole frame, or None when more bytes are needed."""
        if len(self._buffer) < _LENGTHS.size:
            return None
        head_size, blob_size = _LENGTHS.unpack_from(self._buffer)
        end = _LENGTHS.size + head_size + blob_size
        if len(self._buffer) < end:
            return None
        head = bytes(self._buffer[_LENGTHS.size : _LENGTHS.size + head_size])
        blob = bytes(self._buffer[_LENGTHS.size + head_size : end])
        del self._buffer[:end]
        header: dict[str, Any] = json.loads(head)
        return header, blob

    def wait(self) -> tuple[dict[str, Any], bytes] | None:
        """Block until a frame is whole; None when the other side has gone first."""
        while (got := self.next()) is None:
            if self.closed:
                return None
            self.fill()
        return got
