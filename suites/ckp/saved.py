"""What the CKP suite does in ranks: save and load through the target's checkpoint manager, and go on training."""

import inspect
import os
import time

import torch

from nanochat_gate import Unsupported, exact
from suites.steps import make_model, run_steps

STEPS = 3  # before the checkpoint, and again after it
META = {"val_bpb": 1.0, "user_config": {}, "device_batch_size": 1, "max_seq_len": 32, "total_batch_size": 32}


def manager(rank):
    return rank.target.module("checkpoint_manager")


def save(rank, folder, step, model_state, optimizer_state, meta=None):
    """The target's save_checkpoint. Unsupported where it has no place for the optimizer of a rank."""
    function = manager(rank).save_checkpoint
    by_rank = "rank" in inspect.signature(function).parameters
    if not by_rank and rank.size > 1:
        raise Unsupported("save_checkpoint takes no rank: one rank alone can save its optimizer")
    function(folder, step, model_state, optimizer_state, {"step": step, **(meta or META)}, **_rank(rank, by_rank))


def load(rank, folder, step, load_optimizer=True):
    """(model state, optimizer state, meta) by the target's load_checkpoint."""
    function = manager(rank).load_checkpoint
    by_rank = "rank" in inspect.signature(function).parameters
    device = torch.device("cpu")
    return function(folder, step, device, load_optimizer=load_optimizer, **_rank(rank, by_rank))


def _rank(rank, by_rank):
    return {"rank": rank.rank} if by_rank else {}


def states(optimizers):
    """As the training script saves them: one state, or a list where there are several optimizers."""
    made = [optimizer.state_dict() for optimizer in optimizers]
    return made if len(made) > 1 else made[0]


def restore(model, optimizers, model_state, optimizer_state):
    model.load_state_dict(model_state, strict=True)
    parts = optimizer_state if isinstance(optimizer_state, list) else [optimizer_state]
    for optimizer, state in zip(optimizers, parts, strict=True):
        optimizer.load_state_dict(state)


def digests(model):
    return {name: exact.bits(parameter) for name, parameter in model.named_parameters()}


def resumed(rank, folder):
    """Bits of the parameters STEPS steps after a checkpoint: in the run that saved it, and in one that loaded it.

    schedule: per group lr, momentum and weight decay as they were saved, and as they were loaded.
    """
    config = {"n_layer": 2}
    model, optimizers = make_model(rank, config)
    named = dict(model.named_parameters())
    run_steps(rank, named, optimizers, STEPS)
    save(rank, folder, STEPS, model.state_dict(), states(optimizers))
    schedule = settings(optimizers)
    run_steps(rank, named, optimizers, STEPS)
    again, others = make_model(rank, config)
    for parameter in again.parameters():
        torch.nn.init.constant_(parameter, 0.125)
    model_state, optimizer_state, meta = load(rank, folder, STEPS)
    restore(again, others, model_state, optimizer_state)
    loaded = settings(others)
    run_steps(rank, dict(again.named_parameters()), others, STEPS)
    return {"on": digests(model), "again": digests(again), "schedule": [schedule, loaded], "step": meta.get("step")}


def settings(optimizers):
    keys = ("lr", "initial_lr", "momentum", "weight_decay", "betas", "eps")
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [{key: group[key] for key in keys if key in group} for group in groups]


def saved_by(rank, folder):
    """Train and save; bits of the parameters after STEPS more steps."""
    model, optimizers = make_model(rank, {"n_layer": 2})
    named = dict(model.named_parameters())
    run_steps(rank, named, optimizers, STEPS)
    save(rank, folder, STEPS, model.state_dict(), states(optimizers))


def loaded_by(rank, folder):
    """What another number of ranks makes of that checkpoint: "" when it loads and takes a step, else the error."""
    model, optimizers = make_model(rank, {"n_layer": 2})
    try:
        model_state, optimizer_state, _ = load(rank, folder, STEPS)
        restore(model, optimizers, model_state, optimizer_state)
    except Unsupported:
        raise
    except (Exception, SystemExit) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def race(rank, folder):
    """Save into a folder that is not there yet, on all ranks at once, while making a folder takes its time."""
    makedirs, mkdir = os.makedirs, os.mkdir

    def slowly(make):
        def made(*args, **kwargs):
            time.sleep(0.2)  # by now every rank has looked and found nothing
            return make(*args, **kwargs)

        return made

    os.makedirs, os.mkdir = slowly(makedirs), slowly(mkdir)
    state = {"x": torch.full((3,), float(rank.rank))}
    save(rank, os.path.join(folder, "a", "b"), 1, {"w": torch.ones(2)}, state)
    torch.distributed.barrier()
    return load(rank, os.path.join(folder, "a", "b"), 1)[1]["x"]


def last_step(rank, folder, steps, strays):
    """find_last_step among checkpoints of these steps, saved in this order, with other files beside them."""
    find = getattr(manager(rank), "find_last_step", None)
    if find is None:
        raise Unsupported("checkpoint_manager.py has no find_last_step")
    for step in steps:
        save(rank, folder, step, {"w": torch.ones(2)}, {"x": torch.ones(2)})
    for name in strays:
        with open(os.path.join(folder, name), "w") as file:
            file.write("not a checkpoint")
    try:
        return find(folder)
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())


def killed(rank, folder, after):
    """Save step 1; be killed as step 2 is saved, half-way through file number `after`; then say what there is.

    Returns [last step found, "" or why it does not load].
    """
    find = getattr(manager(rank), "find_last_step", None)
    if find is None:
        raise Unsupported("checkpoint_manager.py has no find_last_step")
    state, shard = {"w": torch.arange(5000.0)}, {"x": torch.arange(5000.0)}
    save(rank, folder, 1, state, shard)
    child = os.fork()
    if not child:
        try:
            _die_in_file(after)
            save(rank, folder, 2, {"w": -state["w"]}, {"x": -shard["x"]})
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    last = find(folder)
    try:
        model_state, optimizer_state, _ = load(rank, folder, last)
    except Exception as error:
        return [last, " ".join(f"{type(error).__name__}: {error}".split())]
    sign = 1 if last == 1 else -1
    whole = torch.equal(model_state["w"], sign * state["w"]) and torch.equal(optimizer_state["x"], sign * shard["x"])
    return [last, "" if whole else "its tensors are not those that were saved"]


def _die_in_file(after):
    """End the process half-way through the `after`-th file that torch.save writes from now on."""
    kept, count = torch.save, iter(range(1, 100))

    def half(obj, f, *args, **kwargs):
        if next(count) < after:
            return kept(obj, f, *args, **kwargs)
        path = f if isinstance(f, (str, os.PathLike)) else getattr(f, "name", None)
        kept(obj, f, *args, **kwargs)
        if not isinstance(f, (str, os.PathLike)):
            f.flush()
        os.truncate(path, os.path.getsize(path) // 2)
        os._exit(9)

    torch.save = half
