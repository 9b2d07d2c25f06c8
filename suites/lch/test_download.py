"""LCH: a file that several ranks want at once.

LCH-06  the download helper returns to every rank only when the file is whole and post-processed (should)
"""

import inspect
import io
import os
import time
import urllib.request
from pathlib import Path

from nanochat_gate import Unsupported, requirement, verify

URL = "http://gate.invalid/bundle.bin"
NAME = "bundle.bin"
HALF = b"0123456789abcdef" * 4096
CONTENT = HALF + HALF[::-1]
SLOW = 0.7  # s that one rank is given to overtake another; nothing is judged by it but what is already wrong
WAIT = 60.0  # s for another rank to come to where this one waits for it


class Slow(io.RawIOBase):
    """A response that says when it has given out half of the content, and takes its time before the other half."""

    status = code = 200

    def __init__(self, marker):
        super().__init__()
        self.marker = marker
        self.at = 0
        self.headers = {"Content-Length": str(len(CONTENT))}

    def readable(self):
        return True

    def getcode(self):
        return self.code

    def info(self):
        return self.headers

    def read(self, size=-1):
        if size is None or size < 0:
            return self.read(len(HALF)) + self.read(len(HALF))
        if self.at == len(HALF):
            self.marker.touch()
            time.sleep(SLOW)
        end = min(self.at + size, len(HALF) if self.at < len(HALF) else len(CONTENT))
        start, self.at = self.at, end
        return CONTENT[start:end]

    def readinto(self, buffer):
        got = self.read(len(buffer))
        buffer[: len(got)] = got
        return len(got)


def wait_for(*markers):
    """Until one of the files is there."""
    deadline = time.monotonic() + WAIT
    while not any(marker.exists() for marker in markers):
        if time.monotonic() > deadline:
            raise TimeoutError(f"none of {', '.join(marker.name for marker in markers)} came within {WAIT:.0f} s")
        time.sleep(0.005)


def download(rank, folder):
    """Ask for the file: rank 0 at once, rank 1 when half of it has come, rank 2 when it may seem to be there.

    whole: whether all of it was there on return; processed, times: whether its post-processing had ended by then, and
    how often it began, None where the helper takes none; opened: whether this rank opened the URL itself.
    """
    folder = Path(folder)
    half, began, ended = (folder / name for name in ("half", "began", "ended"))
    os.environ["NANOCHAT_BASE_DIR"] = str(folder / "base")
    file = folder / "base" / NAME
    common = rank.target.module("common")
    fetch = getattr(common, "download_file_with_lock", None)
    if fetch is None:
        raise Unsupported("common.py has no download_file_with_lock")
    takes = list(inspect.signature(fetch).parameters)
    if takes[:2] != ["url", "filename"]:
        raise Unsupported(f"download_file_with_lock takes {', '.join(takes)}, not url and filename")
    opened = []

    def urlopen(url, *args, **kwargs):
        opened.append(str(url))
        return Slow(half)

    real, urllib.request.urlopen = urllib.request.urlopen, urlopen
    for name in [name for name, value in vars(common).items() if value is real]:
        setattr(common, name, urlopen)

    def process(path):
        with open(began, "a") as marker:
            marker.write("once ")
        time.sleep(SLOW)
        ended.touch()

    processes = "postprocess_fn" in takes
    before = {0: (), 1: (half,), 2: (began, file)}[rank.rank]
    if before:
        wait_for(*before)
    try:
        fetch(URL, NAME, **({"postprocess_fn": process} if processes else {}))
    except OSError as error:
        if rank.rank == 0 and not opened:
            raise Unsupported(f"download_file_with_lock does not go through urllib.request.urlopen: {error}") from None
        raise
    processed, whole = ended.exists(), file.exists() and file.read_bytes() == CONTENT
    return {"whole": whole, "processed": processed if processes else None, "opened": len(opened), "began": str(began)}


@requirement(
    "LCH-06",
    "A file that several ranks download at once is whole and post-processed when the helper returns, and only once",
    level="should",
    sizes=(3,),
)
def test_download(ranks, size, tmp_path):
    """A rank reads half a file, or a folder that another rank has only begun to unpack, and crashes or goes astray."""
    where = "download_file_with_lock"
    said = ranks(download, str(tmp_path), size=size, fresh=True)
    for rank, of_rank in enumerate(said):
        verify(of_rank["whole"], f"{where} returns when the file is whole", f"on rank {rank} it is not")
        verify(
            of_rank["processed"] is not False,
            f"{where} returns to every rank when the post-processing has ended",
            f"on rank {rank} it returns while another rank is still at it",
            hint="a file that is there already may not be processed yet: look for it under the lock",
        )
    if said[0]["processed"] is not None:
        times = (tmp_path / "began").read_text().count("once")
        verify(times == 1, "the file is post-processed once", f"it is post-processed {times} times")
