"""Whole runs of a target's own training script on the bundled corpus, shared by the CKP, LCH and TRN suites.

In ranks: `prepare` trains the tokenizer with the target's tok_train, `run_script` runs base_train and watches it.
In pytest: `corpus_base` is the prepared base directory, `train` a run in our ranks, `flags` the tiny size of all runs.
"""

import contextlib
import io
import os
import runpy
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanochat_gate import Unsupported, exact, script, standins
from nanochat_gate.server import ROOT
from suites.pg.start import needs_init

CORPUS = ROOT / "nanochat" / "corpus"
# The folders that revisions of nanochat read their data from, under the base directory.
DATA_FOLDERS = ("base_data", "base_data_climbmix")
VOCABULARY = 576  # divides by 2, 3 and 4 ranks and by the padding of 64
SEQUENCE = 64
ROWS = 2
DEPTH = 2
NEVER = 1_000_000


class Tee(io.TextIOBase):
    """Keeps what a script prints and passes it on to the rank's log."""

    def __init__(self, out):
        self.out = out
        self.kept = io.StringIO()

    def write(self, text):
        self.kept.write(text)
        return self.out.write(text)

    def flush(self):
        self.out.flush()


def run_module(rank, module, path, argv):
    """Run a script as `python -m module argv` does in its checkout; (exit code, what it printed). Exceptions pass.

    Packages that it imports and this machine lacks, such as loggers, are stood in for until they are used.
    """
    os.chdir(path)
    sys.path.insert(0, path)
    sys.argv = [module, *argv]
    tee = Tee(sys.stdout)
    code = 0
    with contextlib.redirect_stdout(tee):
        try:
            standins.call_without(
                lambda: runpy.run_module(module, run_name="__main__", alter_sys=True),
                rank.target.package,
                module.split(".")[0],
            )
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, tee.kept.getvalue()


def prepare(rank, base, module, path, argv):
    """Train the tokenizer that runs on the corpus share, with the target's own tok_train."""
    os.environ["NANOCHAT_BASE_DIR"] = base
    return run_module(rank, module, path, argv)


def run_script(rank, base, module, path, argv, replay_from=-1):
    """Run the training script on this rank and report what it did.

    code: its exit code; printed: its output; steps: per optimizer step and optimizer, digests of the parameters it left
    and of the tensors of its state; final: digests of the model's parameters at the end; batches: digests of the inputs
    of every forward pass with gradients; tokens: how many targets those passes had in all.
    replay_from: train on the batches of the run before in the same base directory, from that number on.
    """
    os.environ["NANOCHAT_BASE_DIR"] = base
    kept = os.path.join(base, f"batches-rank{rank.rank}.pt")
    given = torch.load(kept)[replay_from:] if replay_from >= 0 else []
    seen = {"steps": [], "batches": [], "tokens": 0}
    models, used = watch(rank, seen, given)
    code, printed = run_module(rank, module, path, argv)
    torch.save(used, kept)
    trained = [model for model in models if not any(p.is_meta for p in model.parameters())]
    final = {n: exact.bits(p) for n, p in trained[0].named_parameters()} if trained else {}
    return {**seen, "code": code, "printed": printed, "final": final}


def watch(rank, seen, given):
    """Hooks on the target's GPT and on every optimizer; returns lists that will hold the models made and batches used.

    given: batches to train on in place of the loader's.
    """
    models, used, given = [], [], iter(given)
    gpt = rank.target.module("gpt").GPT
    init, forward = gpt.__init__, gpt.forward

    def made(self, *args, **kwargs):
        init(self, *args, **kwargs)
        models.append(self)

    def passed(self, idx, targets=None, *args, **kwargs):
        if torch.is_grad_enabled() and targets is not None:
            idx, targets = next(given, (idx, targets))
            used.append((idx.clone(), targets.clone()))
            seen["batches"].append(exact.bits(idx))
            seen["tokens"] += targets.numel()
        return forward(self, idx, targets, *args, **kwargs)

    def after(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]
        state = [exact.bits(t) for t in tensors if t.numel() > 1]
        seen["steps"].append({"parameters": digest(parameters), "state": state})

    gpt.__init__, gpt.forward = made, passed
    register_optimizer_step_post_hook(after)
    return models, used


def digest(tensors):
    return exact.bits(torch.cat([t.detach().flatten().float() for t in tensors])) if tensors else ""


def flags(found, size, steps=4, **wanted):
    """The command line of a tiny run over `size` ranks, one micro-batch each, on the flags this target has."""
    rows = wanted.pop("device_batch_size", ROWS)
    batch = rows * SEQUENCE * size
    tiny = {
        "device_type": "cpu",
        "depth": DEPTH,
        "head_dim": 64,
        "max_seq_len": SEQUENCE,
        "device_batch_size": rows,
        "total_batch_size": batch,
        "num_iterations": steps,
        "warmup_steps": 0,
        "eval_every": NEVER,
        "eval_tokens": 2 * batch,
        "core_metric_every": -1,
        "sample_every": NEVER,
    }
    return found.argv(**(tiny | wanted))


def corpus_base(ranks):
    """A base directory with the bundled corpus and a tokenizer made by the target itself; made once for the run."""

    def make():
        base = ranks.gate.folder / "corpus-base"
        base.mkdir()
        for name in DATA_FOLDERS:
            (base / name).symlink_to(CORPUS)
        found = script.find(ranks.gate.target, "tok_train")
        argv = found.argv(vocab_size=VOCABULARY, max_chars=2_000_000)
        code, printed = ranks(
            prepare, str(base), found.module, found.path, argv, size=1, group=None, torchrun=False, fresh=True
        )[0]
        if code or not (base / "tokenizer" / "token_bytes.pt").exists():
            tail = " ".join(printed.split())[-200:]
            raise Unsupported(f"{found.module} makes no tokenizer from the corpus (exit code {code}): {tail}")
        return str(base)

    return ranks.gate.shared("corpus-base", make)


def new_base(ranks):
    """A fresh base directory on the same corpus and tokenizer, for a run that writes."""
    prepared = Path(corpus_base(ranks))
    base = Path(tempfile.mkdtemp(prefix="base-", dir=ranks.gate.folder))
    for name in DATA_FOLDERS:
        (base / name).symlink_to(CORPUS)
    shutil.copytree(prepared / "tokenizer", base / "tokenizer")
    # Ranks that race to make this folder are CKP-04's matter, and would fail other requirements now and then.
    (base / "base_checkpoints" / f"d{DEPTH}").mkdir(parents=True)
    return str(base)


def train(ranks, size, base=None, as_it_stands=False, replay_from=-1, **wanted):
    """A run of the training script on `size` of our ranks; what each reported (see run_script), and its base directory.

    as_it_stands: only with what the target brings along. Otherwise a target that makes no group on CPU, or whose step
    needs futures that Gloo lacks, is given them, so that the rest of its script can be judged.
    """
    if not as_it_stands:
        needs_init(ranks)
    found = script.find(ranks.gate.target)
    base = base or new_base(ranks)
    facts = ranks.facts
    alone = size == 1 and not facts.alone  # then no process group is wanted
    own = as_it_stands or alone or (facts.group == "target" and facts.step == "ok")
    how = {"group": None, "lane": "plain"} if own else {"group": "provided", "lane": "withheld"}
    argv = flags(found, size, **wanted)
    call = (run_script, base, found.module, found.path, argv, replay_from)
    said = ranks(*call, size=size, torchrun=not alone, fresh=True, limit=120, **how)
    return said, base
