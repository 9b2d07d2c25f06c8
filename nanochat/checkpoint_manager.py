"""Checkpoints: model_<step>.pt and meta_<step>.json by rank 0, optim_<step>_rank<r>.pt by every rank.

The meta file is written last, once every rank has written its own: a checkpoint without one is not there. So a run
killed while it saves leaves nothing that loads.
"""

import json
import logging
import os
import re

import torch
import torch.distributed as dist

from nanochat.common import get_base_dir, is_ddp_initialized
from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import get_tokenizer

logger = logging.getLogger(__name__)

FOLDERS = {"base": "base_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}


def _path(checkpoint_dir, what, step, rank=0):
    name = {"model": "model_{:06d}.pt", "meta": "meta_{:06d}.json", "optim": "optim_{:06d}_rank{:d}.pt"}[what]
    return os.path.join(checkpoint_dir, name.format(step, rank))


def _write(path, write):
    """Call `write(file)` on a temporary name and give the file its own when it is whole and on the disk."""
    with open(path + ".partial", "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".partial", path)


def _barrier():
    if is_ddp_initialized():
        dist.barrier()


def save_checkpoint(checkpoint_dir, step, model_data, optimizer_data, meta_data, rank=0):
    """Write a checkpoint; every rank of the process group calls this, with its own shard in `optimizer_data`.

    model_data, optimizer_data: state dicts, the second may be None; meta_data: a dict that JSON can hold, to which the
    world size is added.
    """
    os.makedirs(checkpoint_dir, exist_ok=True)
    meta_path = _path(checkpoint_dir, "meta", step)
    if rank == 0 and os.path.exists(meta_path):  # an older checkpoint of this step ends before it is overwritten
        os.remove(meta_path)
    _barrier()
    if rank == 0:
        _write(_path(checkpoint_dir, "model", step), lambda file: torch.save(model_data, file))
    if optimizer_data is not None:
        _write(_path(checkpoint_dir, "optim", step, rank), lambda file: torch.save(optimizer_data, file))
    _barrier()
    if rank == 0:
        meta = {**meta_data, "world_size": dist.get_world_size() if is_ddp_initialized() else 1}
        _write(meta_path, lambda file: file.write(json.dumps(meta, indent=2).encode()))
        logger.info(f"Saved step {step} to {checkpoint_dir}")
    _barrier()


def _steps(checkpoint_dir):
    """Steps of the whole checkpoints in a folder, in order. Other files are left alone."""
    names = os.listdir(checkpoint_dir) if os.path.isdir(checkpoint_dir) else []
    found = [re.fullmatch(r"meta_(\d+)\.json", name) for name in names]
    steps = {int(match[1]) for match in found if match}
    return sorted(step for step in steps if os.path.exists(_path(checkpoint_dir, "model", step)))


def _load(path, device):
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except Exception as error:
        first = str(error).split("\n")[0]
        raise ValueError(f"{path} cannot be read ({first}): use the checkpoint of another step.") from None


def _shards(checkpoint_dir, step, meta):
    """How many ranks saved the checkpoint; older meta files do not say, so the shards are counted."""
    if "world_size" in meta:
        return meta["world_size"]
    pattern = re.compile(rf"optim_{step:06d}_rank\d+\.pt")
    return sum(bool(pattern.fullmatch(name)) for name in os.listdir(checkpoint_dir))


def load_checkpoint(checkpoint_dir, step, device, load_optimizer=False, rank=0):
    """(model state, this rank's optimizer state or None, meta) of a step.

    Raises FileNotFoundError where there is no whole checkpoint of the step, and ValueError where its optimizer shards
    belong to another number of ranks.
    """
    meta_path = _path(checkpoint_dir, "meta", step)
    if step not in _steps(checkpoint_dir):
        have = ", ".join(map(str, _steps(checkpoint_dir))) or "none"
        raise FileNotFoundError(f"{checkpoint_dir} has no whole checkpoint of step {step}; it has {have}.")
    with open(meta_path) as file:
        meta = json.load(file)
    optimizer_data = None
    if load_optimizer:
        saved, here = _shards(checkpoint_dir, step, meta), dist.get_world_size() if is_ddp_initialized() else 1
        if saved != here:
            raise ValueError(
                f"The checkpoint of step {step} was saved by {saved} ranks, each with its shard of the optimizer, and "
                f"does not fit {here}: go on with {saved} ranks."
            )
        path = _path(checkpoint_dir, "optim", step, rank)
        if not os.path.exists(path):
            raise FileNotFoundError(f"{path} is missing: copy the shards of all ranks into the folder.")
        optimizer_data = _load(path, device)
    return _load(_path(checkpoint_dir, "model", step), device), optimizer_data, meta


def find_last_step(checkpoint_dir):
    """The highest step of a whole checkpoint. FileNotFoundError where there is none."""
    steps = _steps(checkpoint_dir)
    if not steps:
        raise FileNotFoundError(f"There is no whole checkpoint in {checkpoint_dir}.")
    return steps[-1]


def find_largest_model(checkpoints_dir):
    """The model tag of the greatest depth (d<depth>), or the one written last where no tag tells its depth."""
    tags = sorted(os.listdir(checkpoints_dir)) if os.path.isdir(checkpoints_dir) else []
    tags = [tag for tag in tags if os.path.isdir(os.path.join(checkpoints_dir, tag))]
    if not tags:
        raise FileNotFoundError(f"There is no model in {checkpoints_dir}: train one with nanochat.scripts.base_train.")
    depths = [(int(tag[1:]), tag) for tag in tags if re.fullmatch(r"d\d+", tag)]
    if depths:
        return max(depths)[1]
    return max(tags, key=lambda tag: os.path.getmtime(os.path.join(checkpoints_dir, tag)))


def _complete(weights, config):
    """Give a state of an older model the parameters it lacks, at values under which they do nothing."""
    ones, zero = torch.ones(config.n_layer), torch.zeros(1)
    weights.setdefault("resid_lambdas", ones)
    weights.setdefault("x0_lambdas", torch.zeros(config.n_layer))
    if "smear_lambda" not in weights:
        weights |= {"smear_lambda": zero.clone(), "smear_gate.weight": torch.zeros(1, 24)}
    weights.setdefault("backout_lambda", zero)


def build_model(checkpoint_dir, step, device, phase):
    """(model, tokenizer, meta) of a checkpoint; phase is "train" or "eval", as the model's mode."""
    if phase not in ("train", "eval"):
        raise ValueError(f'phase is {phase!r}: expected "train" or "eval".')
    device = torch.device(device)
    weights, _, meta = load_checkpoint(checkpoint_dir, step, device)
    weights = {name.removeprefix("_orig_mod."): tensor for name, tensor in weights.items()}
    if device.type in ("cpu", "mps"):
        weights = {n: t.float() if t.dtype is torch.bfloat16 else t for n, t in weights.items()}
    config = GPTConfig(**{"window_pattern": "L", **meta["model_config"]})
    _complete(weights, config)
    tokenizer = get_tokenizer()
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise ValueError(
            f"The model of {checkpoint_dir} has {config.vocab_size} tokens and the tokenizer "
            f"{tokenizer.get_vocab_size()}: put the tokenizer it was trained with into the base directory."
        )
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()  # the rotary tables are no part of a checkpoint
    model.load_state_dict(weights, strict=True, assign=True)
    model.train(phase == "train")
    return model, tokenizer, meta


def _locate(source, model_tag, step):
    if source not in FOLDERS:
        raise ValueError(f"source is {source!r}: expected one of {', '.join(FOLDERS)}.")
    folder = os.path.join(get_base_dir(), FOLDERS[source])
    checkpoint_dir = os.path.join(folder, model_tag or find_largest_model(folder))
    return checkpoint_dir, find_last_step(checkpoint_dir) if step is None else step


def load_model(source, device, phase, model_tag=None, step=None):
    """build_model() from the base directory: source is "base", "sft" or "rl"; default the largest model's last step."""
    return build_model(*_locate(source, model_tag, step), device, phase)


def load_optimizer_state(source, device, rank, model_tag=None, step=None):
    """The optimizer state that `rank` saved with load_model()'s model, or None where it saved none."""
    checkpoint_dir, step = _locate(source, model_tag, step)
    if not os.path.exists(_path(checkpoint_dir, "optim", step, rank)):
        return None
    return load_checkpoint(checkpoint_dir, step, device, load_optimizer=True, rank=rank)[1]
