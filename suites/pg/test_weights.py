"""PG: the weights that ranks start from.

PG-10  bit-equal on all ranks, which were seeded differently before compute_init
PG-11  every parameter and buffer is initialised
"""

import pytest
import torch

from nanochat_gate import Unsupported, requirement, verify
from suites.pg.start import begin, initial_weights, needs_init, tensors, verify_equal


def start_and_make(rank):
    begin(rank)
    return initial_weights(rank)[1]


@pytest.mark.core
@requirement("PG-10", "Initial weights are bit-equal on all ranks", sizes=(2, 3, 4))
def test_equal(ranks, size, backend):
    """Ranks that start from other weights average the gradients of different models, and never agree again."""
    needs_init(ranks, backend)
    verify_equal(ranks, ranks(start_and_make, size=size, backend=backend, group=None, fresh=True))


# Whatever of a model depends on its configuration is there in one of these, and absent in another.
CONFIGS = (
    {},
    {"n_layer": 1, "window_pattern": "L"},
    {"n_layer": 3, "n_kv_head": 4, "vocab_size": 200},
)


def leftovers(rank, configs):
    """Per configuration: name -> what of the tensor init_weights left as to_empty gave it. None where not built.

    Memory is filled with NaN before init_weights, and where there is no NaN with -1 in one model and 0 in another.
    """
    if not rank.target.builds_on_meta:
        raise Unsupported("the target makes models in place, without to_empty: there is nothing to be left over")
    found = []
    for config in configs:
        pair = []
        try:
            for integers in (-1, 0):
                torch.manual_seed(42)
                pair.append(tensors(rank.target.model(rank.device, integers=integers, **config)))
        except Exception:
            if not config:
                raise
            found.append(None)
            continue
        kept = {name: left_over(one, pair[1][name]) for name, one in pair[0].items()}
        found.append({name: text for name, text in kept.items() if text})
    return found


def left_over(one, other):
    """What of a tensor was never written: "" when all of it was."""
    if one.is_meta:
        return "still on the meta device"
    if one.is_floating_point():
        kept = one.float().isnan()
    else:
        kept = (one == torch.full_like(one, -1)) & (other == torch.zeros_like(other))
    count = int(kept.sum())
    if not count:
        return ""
    return "never written" if count == one.numel() else f"{count} of {one.numel()} elements never written"


@pytest.mark.core
@requirement("PG-11", "init_weights initialises every parameter and buffer", sizes=(2,))
def test_initialised(ranks, size, backend):
    """What to_empty leaves is whatever memory held before: zeros in a test, another run's values in a long one."""
    for rank, found in enumerate(ranks(leftovers, CONFIGS, size=size, backend=backend)):
        for config, names in zip(CONFIGS, found, strict=True):
            of = ", ".join(f"{key}={value}" for key, value in config.items()) or "a small model"
            verify(
                not names,
                "init_weights writes every element of every parameter and buffer",
                f"rank {rank}, {of}: " + ", ".join(f"{name} ({text})" for name, text in (names or {}).items()),
                where=ranks.facts.where.get("init_weights", ""),
                hint="a model made on the meta device has uninitialised memory after to_empty",
            )
