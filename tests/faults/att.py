"""Faults of attention, its choice of a kernel, and the KV cache."""

from tests.faults.edit import Edit, Fault

ATTENTION = "nanochat/flash_attention.py"

FAULTS = [
    Fault(
        "window-off-by-one",
        "A sliding window reaches one key too far back, so a model trained here differs from one trained with FA3.",
        Edit(ATTENTION, "_sdpa", "key >= at - left", "key >= at - left - 1"),
        ids=(),
        uncaught="no requirement on attention yet",
    ),
]
