"""LCH: ranks that were given different files.

LCH-05  a tokenizer or data that differ between ranks are found before the first step (should)
"""

import contextlib
import os
import re
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nanochat_gate import Unsupported, requirement, script, verify
from suites import whole

# A word for what differs, in what a rank says as it ends; "loader" is what every traceback through one would hold.
NAMES = {
    "tokenizer": re.compile(r"tokeni[sz]er|vocab", re.I),
    "data": re.compile(r"\bdata\b|\bdata ?set\b|shard|parquet|corpus", re.I),
}


def run_differing(rank, bases, module, path, argv):
    """The training script with a base directory of this rank's own: how many steps it made and how it ended.

    error: the exception it ended in, or what it wrote to stderr before it ended with a code; "" where it came through.
    """
    os.environ["NANOCHAT_BASE_DIR"] = bases[rank.rank]
    steps = []
    register_optimizer_step_pre_hook(lambda *_: steps.append(1))
    errors = whole.Tee(sys.stderr)
    error = ""
    with contextlib.redirect_stderr(errors):
        try:
            code, printed = whole.run_module(rank, module, path, argv)
            if code:
                error = (errors.kept.getvalue() or printed)[-600:]
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return {"steps": len(steps), "error": " ".join(error.split())[:600]}


def other_tokenizer(ranks, base):
    """Put a tokenizer of the same size into the base directory, trained by the target on texts read backwards."""
    found = script.find(ranks.gate.target, "tok_train")
    elsewhere = Path(tempfile.mkdtemp(prefix="backwards-", dir=ranks.gate.folder))
    for folder in whole.DATA_FOLDERS:
        (elsewhere / folder).mkdir()
        for shard in sorted(whole.CORPUS.glob("*.parquet"))[-2:]:
            texts = [text[::-1] for text in pq.read_table(shard, columns=["text"])["text"].to_pylist()]
            pq.write_table(pa.table({"text": texts}), elsewhere / folder / shard.name)
    argv = found.argv(vocab_size=whole.VOCABULARY, max_chars=2_000_000)
    how = {"size": 1, "group": None, "torchrun": False, "fresh": True}
    ranks(whole.prepare, str(elsewhere), found.module, found.path, argv, **how)
    theirs = elsewhere / "tokenizer"
    mine = Path(base) / "tokenizer"
    assert any((theirs / file.name).read_bytes() != file.read_bytes() for file in mine.iterdir())
    mine.rename(Path(base) / "tokenizer-before")
    theirs.rename(mine)


def other_data(ranks, base):
    """Leave the first shard out of the base directory's data."""
    for name in whole.DATA_FOLDERS:
        folder = Path(base) / name
        folder.unlink()
        folder.mkdir()
        for shard in sorted(whole.CORPUS.glob("*.parquet"))[1:]:
            (folder / shard.name).symlink_to(shard)


@pytest.mark.parametrize("what", list(NAMES))
@requirement(
    "LCH-05",
    "A tokenizer or data that differ between ranks are found before the first step, and named by every rank",
    level="should",
    sizes=(2,),
)
def test_differing(ranks, size, what):
    """Machines with copies of their own train apart: token ids mean other text, rows are read twice or never."""
    bases = [whole.new_base(ranks) for _ in range(size)]
    {"tokenizer": other_tokenizer, "data": other_data}[what](ranks, bases[-1])
    found, facts = script.find(ranks.gate.target), ranks.facts
    own = facts.group == "target" and facts.step == "ok"
    how = {"group": None, "lane": "plain"} if own else {"group": "provided", "lane": "withheld"}
    argv = whole.flags(found, size, steps=2)
    said = ranks(run_differing, bases, found.module, found.path, argv, size=size, fresh=True, limit=120, **how)
    expected = f"every rank ends before its first step and says that ranks differ in their {what}"
    if not all(NAMES[what].search(of_rank["error"]) for of_rank in said):
        runs_at_all(ranks, bases[:1] * size, how, argv)
    for rank, of_rank in enumerate(said):
        trained = f"rank {rank} of {size} makes {of_rank['steps']} steps"
        ending = f"ends with {of_rank['error']}" if of_rank["error"] else "ends as if all were well"
        verify(not of_rank["steps"], expected, f"{trained} and {ending}", hint="agree on a fingerprint over the group")
        verify(bool(NAMES[what].search(of_rank["error"])), expected, f"rank {rank} of {size} {ending}")


def runs_at_all(ranks, bases, how, argv):
    """Unsupported where the script ends in an error with the same files on all ranks too."""
    found = script.find(ranks.gate.target)
    args = (bases, found.module, found.path, argv)
    said = ranks(run_differing, *args, size=len(bases), fresh=True, limit=120, **how)
    for rank, of_rank in enumerate(said):
        if of_rank["error"] or not of_rank["steps"]:
            raise Unsupported(f"rank {rank} does not train with the same files either: {of_rank['error'] or 'no step'}")
