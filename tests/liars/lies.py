"""Lying checkouts, made by code appended to files of a copy of the reference."""

from dataclasses import dataclass

from nanochat_gate.verdict import BLOCKED, FAIL, INCONCLUSIVE

OPTIM, COMMON, GPT = "nanochat/optim.py", "nanochat/common.py", "nanochat/gpt.py"
BACKED = ("PG-01", "OPT-01", "OPT-02")


@dataclass(frozen=True)
class Liar:
    """file, code:  what is appended to which file.
    verdict:     what the run must conclude.
    red:         ids of which every record must be red, the others must be green.
    says:        what the actual text of each of them must say.
    where:       the file that must be pointed at.
    """

    name: str
    file: str
    code: str
    verdict: str
    red: tuple[str, ...]
    says: str
    where: str = ""
    ids: tuple[str, ...] = BACKED


def in_step(first="", then=""):
    """Code that wraps the optimizer's step, with `first` before and `then` after it."""
    return f"""
_honest_step = MuonAdamW.step


@torch.no_grad()
def _step(self):
    rank = dist.get_rank() if dist.is_initialized() else 0
    {first or "pass"}
    _honest_step(self)
    {then or "pass"}


MuonAdamW.step = _step
"""


def on_rank_1(what):
    return in_step(f"if rank == 1: {what}")


# A parameter that no rank gets from another, so that rank 0 stays right.
SMALLEST = "min((p for g in self.param_groups for p in g['params']), key=torch.numel)"

GREEN = """
print("============================= 78 passed in 3.21s ==============================")
print("verdict: PASS", flush=True)
"""

LIARS = [
    Liar(
        "wrong-alike-everywhere",
        OPTIM,
        in_step(then="for g in self.param_groups: torch._foreach_mul_(g['params'], 0.5)"),
        verdict=FAIL,
        red=("OPT-16",),
        says="times the bound",
        ids=("OPT-02", "OPT-16"),
    ),
    Liar(
        "right-on-rank-0-only",
        OPTIM,
        in_step(then=f"if rank > 0: {SMALLEST}.mul_(1.0001)"),
        verdict=FAIL,
        red=("OPT-01", "OPT-02"),
        says="rank 1 of 2, step 0: 1 of",
    ),
    Liar(
        "prints-green",
        OPTIM,
        GREEN + in_step(GREEN.strip().replace("\n", "; "), f"if rank > 0: {SMALLEST}.fill_(0.5)"),
        verdict=FAIL,
        red=("OPT-01", "OPT-02"),
        says="rank 1 of 2, step 0: 1 of",
    ),
    Liar(
        "exits-with-0-on-rank-1",
        OPTIM,
        on_rank_1("os._exit(0)"),
        verdict=FAIL,
        red=("OPT-01", "OPT-02"),
        says="rank 1 of 2: the process ended itself with exit code 0",
    ),
    Liar(
        "killed-on-rank-1",
        OPTIM,
        on_rank_1("os.kill(os.getpid(), 9)"),
        verdict=FAIL,
        red=("OPT-01", "OPT-02"),
        says="rank 1 of 2: the process was ended by SIGKILL",
    ),
    Liar(
        "segfaults-on-rank-1",
        OPTIM,
        on_rank_1("__import__('ctypes').string_at(0)"),
        verdict=FAIL,
        red=("OPT-01", "OPT-02"),
        says="rank 1 of 2: the process was ended by SIGSEGV",
    ),
    Liar(
        "hangs-on-rank-1",
        OPTIM,
        on_rank_1("__import__('time').sleep(600)"),
        verdict=FAIL,
        red=("OPT-01",),
        says="hangs: no rank used the processor for",
        ids=("OPT-01",),
    ),
    Liar(
        "skips-a-collective-on-rank-1",
        OPTIM,
        on_rank_1("self.param_groups.pop()"),
        verdict=FAIL,
        red=("OPT-01",),
        says="rank 1: all_gather_single",
        where="nanochat/optim.py",
        ids=("OPT-01",),
    ),
    Liar(
        "pretends-to-have-a-group",
        COMMON,
        "_honest = get_dist_info\n\n\ndef compute_init(device_type='cuda'):\n"
        "    torch.manual_seed(42)\n    return *_honest(), torch.device(device_type)\n",
        verdict=FAIL,
        red=("PG-01",),
        says="makes no process group: every rank trains alone",
        where="nanochat/common.py",
        ids=("PG-01",),
    ),
    Liar(
        "cannot-be-imported",
        COMMON,
        "import a_module_nobody_has\n",
        verdict=BLOCKED,
        red=BACKED,
        says="importing nanochat.common fails: ModuleNotFoundError: No module named 'a_module_nobody_has'",
    ),
    Liar(
        "exits-politely-at-import",
        COMMON,
        "import sys\n\nsys.exit(0)\n",
        verdict=BLOCKED,
        red=BACKED,
        says="importing nanochat.common fails: SystemExit: 0",
    ),
    Liar(
        "exits-at-import",
        COMMON,
        GREEN + "os._exit(0)\n",
        verdict=BLOCKED,
        red=BACKED,
        says="the process ended itself with exit code 0",
    ),
    Liar(
        "has-nothing-to-judge",
        GPT,
        "del GPT.setup_optimizer\n",
        verdict=INCONCLUSIVE,
        red=(),
        says="",
    ),
    Liar(
        "leaves-children-behind",
        COMMON,
        "import subprocess\n\nsubprocess.Popen(['sleep', '600'], start_new_session=True)\n",
        verdict=INCONCLUSIVE,
        red=(),
        says="",
        ids=("PG-01", "PG-16"),
    ),
]
