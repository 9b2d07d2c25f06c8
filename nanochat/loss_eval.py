"""Bits per byte: a loss that does not depend on how the tokenizer cuts the text."""

import itertools
import math

import torch
import torch.distributed as dist

from nanochat.common import is_ddp_initialized


@torch.no_grad()
def evaluate_bpb(model, batches, steps, token_bytes):
    """Total nats / (ln 2 * total bytes), a float, over `steps` of the (inputs, targets) batches and over all ranks.

    model(x, y, loss_reduction="none") gives the nats of each target; token_bytes: (vocab_size,) integers. A target
    that is negative (ignored) or has no bytes (a special token) counts in neither sum. inf where there are no bytes.
    """
    device = token_bytes.device
    nats = torch.zeros((), dtype=torch.float32, device=device)
    total_bytes = torch.zeros((), dtype=torch.int64, device=device)
    for x_BT, y_BT in itertools.islice(batches, steps):
        loss = model(x_BT, y_BT, loss_reduction="none").flatten().float()
        y = y_BT.flatten()
        size = torch.where(y >= 0, token_bytes[y.clamp_min(0)], 0)
        nats += torch.where(size > 0, loss, 0.0).sum()
        total_bytes += size.sum()
    if is_ddp_initialized():
        dist.all_reduce(nats)
        dist.all_reduce(total_bytes)
    if total_bytes.item() == 0:
        return math.inf
    return nats.item() / (math.log(2) * total_bytes.item())
