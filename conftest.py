"""Options, hooks and fixtures of the gate; all of them live in nanochat_gate.plugin."""

from pathlib import Path

import pytest

pytest_plugins = ["nanochat_gate.recording", "nanochat_gate.plugin"]


def pytest_gate_written(config: pytest.Config, path: Path) -> None:
    """Make verdict.md and verdict.html beside the verdict.jsonl that was just written."""
    from reports import gate

    gate.render(path.parent)
