"""CKP: checkpoints that the target's own training script writes and resumes from.

CKP-02  every rank's optimizer shard is in them
CKP-03  given the same batches, the resumed script ends bitwise as the one that was not stopped
"""

from pathlib import Path

import torch

from nanochat_gate import Unsupported, exact, requirement, script, verify
from suites import whole

STEPS, SAVED = 4, 2


def run(ranks, size):
    """[what each rank reported, the base directory] of a run of STEPS steps with a checkpoint after SAVED."""

    def make():
        return list(whole.train(ranks, size, steps=STEPS, save_every=SAVED))

    said, base = ranks.gate.shared(f"ckp-script-{size}", make)
    for rank, of_rank in enumerate(said):
        tail = " ".join(of_rank["printed"].split())[-150:]
        verify(of_rank["code"] == 0, f"rank {rank} of {size} trains and saves", f"code {of_rank['code']}: {tail}")
    return said, base


def tensors(made):
    """Digests of all tensors with more than one element inside nested dicts and lists."""
    if isinstance(made, torch.Tensor):
        return {exact.bits(made)} if made.numel() > 1 else set()
    parts = made.values() if isinstance(made, dict) else made if isinstance(made, (list, tuple)) else ()
    return set().union(*map(tensors, parts))


@requirement("CKP-02", "The script's checkpoint holds every rank's optimizer shard", sizes=(2,))
def test_shards(ranks, size):
    """Rank 0's shard alone resumes the others with moments of zero or of other parameters."""
    said, base = run(ranks, size)
    files = sorted(Path(base, "base_checkpoints").rglob("*.pt"))
    verify(bool(files), "a checkpoint under base_checkpoints", "the run leaves no .pt file there")
    saved = set().union(*(tensors(torch.load(file, map_location="cpu", weights_only=True)) for file in files))
    optimizers = max(1, len(said[0]["steps"]) // STEPS)
    for rank, of_rank in enumerate(said):
        state = {digest for step in of_rank["steps"][-optimizers:] for digest in step["state"]}
        missing = state - saved
        expected = f"all {len(state)} tensors of rank {rank}'s optimizer state are in the checkpoint"
        verify(bool(state) and not missing, expected, f"{len(missing)} of them are in none of {len(files)} files")


@requirement("CKP-03", "The resumed script ends bitwise as the one that was not stopped", sizes=(2,))
def test_resume(ranks, size):
    """What the script forgets to save or restore, a step counter or a rate, no unit test of its parts can show."""
    found = script.find(ranks.gate.target)
    missing = [name for name in ("resume_from_step", "save_every") if name not in found.flags]
    if missing:
        raise Unsupported(f"{found.module} has no flag {missing[0]}")
    said, base = run(ranks, size)
    resumed, _ = whole.train(
        ranks, size, base=base, replay_from=SAVED, steps=STEPS, resume_from_step=SAVED, save_every=SAVED
    )
    for rank, (first, other) in enumerate(zip(said, resumed, strict=True)):
        told = f"rank {rank} of {size} resumed at step {SAVED}"
        tail = " ".join(other["printed"].split())[-150:]
        verify(other["code"] == 0, f"{told} runs to the end", f"code {other['code']}: {tail}")
        per_step = max(1, len(first["steps"]) // STEPS)
        calls = (STEPS - SAVED) * per_step
        took = f"{len(other['steps'])} calls of step()"
        verify(len(other["steps"]) == calls, f"{told} takes {STEPS - SAVED} steps, {calls} calls", took)
        names = [name for name, bits in first["final"].items() if other["final"].get(name) != bits]
        actual = f"{len(names)} of {len(first['final'])} parameters differ: {', '.join(names[:3])}"
        verify(not names, f"{told}, on the same batches, ends with the same bits", actual)
