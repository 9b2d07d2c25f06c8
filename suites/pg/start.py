"""What the PG suite does in ranks, and how it words what came of it.

In ranks: `start` calls compute_init and reports as plain data, `begin` calls it as a training script does and goes on
in a group of ours where it made none, `initial_weights` is what must then agree of a model.
In pytest: `what_happened` is one sentence on a start, `needs_init` stops where compute_init cannot run on this CPU.
"""

import contextlib

import torch
import torch.distributed as dist

from nanochat_gate import Unsupported, exact, verify

RAISES = "compute_init raises"


def start(rank, device=None):
    """compute_init("cpu"), or for another device: what it returned, raised and made.

    tuple: its values, devices as text; raised: "" or the exception; size, number, backend, total: of the group it made
    (0, 0, "" and 0 without one), where total is what an all_reduce of every rank's number plus one came to.
    """
    made = {"raised": "", "tuple": [], "size": 0, "number": 0, "backend": "", "total": 0}
    rank.target.module("common")
    try:
        made["tuple"] = plain(rank.target.compute_init(device or rank.device.type))
    except (Exception, SystemExit) as error:
        made["raised"] = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
    if dist.is_initialized():
        made |= {"size": dist.get_world_size(), "number": dist.get_rank(), "backend": rank.group_backend()}
        if not made["raised"]:
            total = torch.tensor([float(rank.rank + 1)], device=rank.device)
            dist.all_reduce(total)
            made["total"] = int(total)
    return made


def plain(returned):
    """What compute_init returned, fit to cross to pytest."""
    values = list(returned) if isinstance(returned, (tuple, list)) else [returned]
    return [value if isinstance(value, int) else _device(value) for value in values]


def _device(value):
    return "cpu" if isinstance(value, torch.device) and value.type == "cpu" else str(value)


def begin(rank):
    """Start as a training script does, in a group of ours where the target makes none."""
    rank.rendezvous()
    rank.target.compute_init(rank.device.type)
    provide(rank)


def provide(rank):
    """A group of ours where compute_init made none, or one of another size."""
    if dist.is_initialized() and dist.get_world_size() != rank.size:
        dist.destroy_process_group()
    if not dist.is_initialized():
        rank.rendezvous()
        rank.join()


def tensors(model):
    """Every parameter and buffer of a model by name, those that no checkpoint holds included."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def initial_weights(rank, **config):
    """A model made as a training script makes it, and a digest of each of its tensors.

    Its optimizer is made first, since some forks synchronise parameters there; if it cannot be, others will say so.
    """
    model = rank.target.model(rank.device, **config)
    with contextlib.suppress(Exception):
        rank.target.optimizers(model)
    return model, {name: exact.bits(tensor) for name, tensor in tensors(model).items()}


def needs_init(ranks, backend="gloo"):
    """Unsupported where compute_init cannot run on CPU: it sets the seeds, so nothing after it can be judged."""
    if backend == "gloo" and ranks.facts.cpu_init.startswith(RAISES):
        raise Unsupported(f"under torchrun on CPU {ranks.facts.cpu_init}")


def what_happened(made):
    """One sentence on a start under torchrun."""
    if made["raised"]:
        return f"under torchrun {RAISES} {made['raised']}"
    if not made["size"]:
        ddp, _, _, world_size, *_ = made["tuple"] + [None] * 4
        says = f"reports world size {world_size} but" if ddp else "reports a run of one process and"
        alone = "" if world_size == 1 else ": every rank trains alone"
        return f"under torchrun compute_init {says} makes no process group{alone}"
    return f"compute_init makes a {made['backend']} group of {made['size']} in which this is rank {made['number']}"


def verify_tuple(ranks, got, want, given):
    """The 5-tuple of a start against the one that follows from the environment `given`."""
    verify(
        got == want,
        f"compute_init returns {shown(want)} with {given}",
        f"it returns {shown(got)}",
        where=ranks.facts.where.get("compute_init", ""),
        hint="(ddp, rank, local_rank, world_size, device), the numbers from RANK, LOCAL_RANK and WORLD_SIZE",
    )


def shown(values):
    return f"({', '.join(map(str, values))})"


def verify_equal(ranks, digests_by_rank):
    """All ranks hold the same bits in all tensors."""
    first = digests_by_rank[0]
    for rank, own in enumerate(digests_by_rank):
        names = sorted(name for name in first.keys() | own.keys() if first.get(name) != own.get(name))
        some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        verify(
            not names,
            f"the same bits on every rank in all {len(first)} parameters and buffers after compute_init, GPT and "
            "init_weights",
            f"rank {rank} of {len(digests_by_rank)} differs from rank 0 in {len(names)}: {some}",
            where=ranks.facts.where.get("compute_init", ""),
            hint="nothing broadcasts parameters, so every rank must be seeded alike before it makes the model",
        )
