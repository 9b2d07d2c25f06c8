"""The folder a lying checkout is gated in."""

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def place():
    """A folder, with a name short enough for a socket, for all that a gate run makes."""
    folder = Path(tempfile.mkdtemp(prefix="liar-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
