"""PG: what compute_init makes of torchrun's environment."""

import torch.distributed as dist

from nanochat_gate import requirement, verify


def start(rank):
    rank.rendezvous()
    out = rank.target.compute_init("cpu")
    ok = dist.is_initialized()
    return {"tuple": [*out[:4], str(out[4])], "size": dist.get_world_size() if ok else 0, "backend": dist.get_backend() if ok else ""}


@requirement("PG-01", "compute_init on CPU under torchrun makes a Gloo group of all ranks", claim="cpu", sizes=(1, 2, 3, 4))
def test_group(ranks, size):
    """Without a group every rank silently trains alone, and throughput still seems to double."""
    for got in ranks(start, size=size, group=None, fresh=True):
        verify(got["size"] == size, f"a gloo group of {size} ranks", f"{got['size']} {got['backend']}", where=ranks.facts.where.get("compute_init", ""))
