"""What the LCH suite makes of torchrun's ways with a flag of the script's."""

import pytest

from nanochat_gate import Violation
from suites.lch.test_side_by_side import verify_passed_or_refused

FLAG = "--run=mine"


@pytest.mark.parametrize(("status", "arrived"), [(0, [FLAG]), (2, None)])
def test_passed_on_or_refused(status, arrived):
    """torch's versions differ in which of the two they do; neither loses the flag."""
    verify_passed_or_refused(FLAG, status, arrived, "")


@pytest.mark.parametrize(("status", "arrived"), [(0, []), (0, None), (None, None), (0, ["--run"]), (2, [])])
def test_swallowed(status, arrived):
    """The run trains under a default, which nobody notices."""
    with pytest.raises(Violation, match="--run=mine, or refuses it"):
        verify_passed_or_refused(FLAG, status, arrived, "")
