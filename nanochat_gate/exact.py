"""Gradients whose sums and averages are exactly representable, so that no order of reduction can change a bit.

A step has MICRO_BATCHES = 12 micro-batches, dealt round-robin: rank r of N takes r, r+N, ... The gradient of each is
12*k/64 with integer |k| <= 64. A rank averages its 12/N micro-batches: N*sum(k)/64; ranks average those: sum(k)/64,
which is what one process gets from all twelve. Every partial sum of a reduction is an integer multiple of 1/64 below
2^10, exact in fp32. N must divide 12. For bf16 and fp16 parameters |k| <= 7: a sum over ranks is N*S/64 with
|S| <= 84, and N*S <= 256 at N = 3 (N = 2, 4 only move the exponent) fits the 8 bits of a bf16 significand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch

MICRO_BATCHES = 12
SCALE = 64
LIMIT_16_BIT = 7


def integers(shape: Iterable[int], limit: int, *key: object) -> torch.Tensor:
    """int64 tensor of values in [-limit, limit], the same for the same key on every rank and machine."""
    seed = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-limit, limit + 1, tuple(shape), generator=generator)


def dealt(shape: Iterable[int], rank: int, size: int, *key: object, limit: int = 64) -> torch.Tensor:
    """The gradient one rank brings to a step, fp32: the average of its own micro-batches.

    key: names the step and the parameter. ValueError when `size` does not divide 12.
    """
    if MICRO_BATCHES % size:
        raise ValueError(f"{MICRO_BATCHES} micro-batches cannot be dealt to {size} ranks; use a divisor of them")
    shape = tuple(shape)
    total = torch.zeros(shape, dtype=torch.int64)
    for batch in range(rank, MICRO_BATCHES, size):
        total += integers(shape, limit, *key, batch)
    return (total * size).to(torch.float32) / SCALE


def bits(tensor: torch.Tensor) -> str:
    """A digest of a tensor's dtype, shape and every bit of its values."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + flat.numpy().tobytes()).hexdigest()[:16]


def differing(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names whose tensors differ in any bit (NaN equal to itself), or that only one side has."""
    return sorted(
        name for name in a.keys() | b.keys() if name not in a or name not in b or bits(a[name]) != bits(b[name])
    )


def summary(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], names: list[str]) -> str:
    """What differs, for a report: how many, the first few names, the largest difference, and whether NaN is there."""
    if not names:
        return "nothing differs"
    nan = [n for n in names if n in a and n in b and bool(torch.isnan(b[n].float()).any())]
    gaps = [
        float((a[n].double() - b[n].double()).abs().nan_to_num().max())
        for n in names
        if n in a and n in b and a[n].shape == b[n].shape and a[n].numel()
    ]
    largest = f", by up to {max(gaps):.3g}" if any(gaps) else ""
    poisoned = f"; NaN in {nan[0]}" if nan else ""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} of {len(a)} tensors differ{largest}: {shown}{poisoned}"
