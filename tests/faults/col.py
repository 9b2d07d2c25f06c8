"""Faults of the collectives: what is waited for, in which order, and with what.

Where a wait is dropped the step takes in what memory held before, or not, as luck has it; most of these leave a run
that trains on a quiet machine, but none says `trains=True` unless it is sure to.
"""

from tests.faults.edit import Edit, Fault

OPTIM = "nanochat/optim.py"

FAULTS = [
    # Waits.
    Fault(
        "all-reduce-not-waited-for",
        "Small parameters are updated with gradients that may not be averaged yet, and ranks drift apart.",
        Edit(OPTIM, "MuonAdamW._adamw", "handle is not None", "handle is not None and p.numel() >= SMALL"),
        ids=("COL-10", "COL-11", "OPT-02"),
    ),
    Fault(
        "adamw-reduce-not-waited-for",
        "Embeddings are updated with whatever memory held where the averaged gradient will be.",
        Edit(OPTIM, "MuonAdamW._adamw", "handle is not None", "handle is not None and p.numel() < SMALL"),
        ids=("COL-10", "COL-11", "OPT-02"),
        trains=False,
    ),
    Fault(
        "muon-reduce-not-waited-for",
        "Matrices are updated with whatever memory held where the averaged gradient will be.",
        Edit(OPTIM, "MuonAdamW._muon", "handle.wait()", "pass"),
        ids=("COL-10", "COL-11", "OPT-02"),
        trains=False,
    ),
    Fault(
        "adamw-gather-not-waited-for",
        "The next forward may read embeddings of which other ranks' slices have not arrived.",
        Edit(OPTIM, "MuonAdamW.step", "handle.wait()", "if stacked is not None:\n    handle.wait()"),
        ids=("COL-10", "COL-11", "OPT-02"),
    ),
    Fault(
        "muon-gather-not-waited-for",
        "Matrices are copied from a stack that still holds gradients.",
        Edit(OPTIM, "MuonAdamW.step", "handle.wait()", "if stacked is None:\n    handle.wait()"),
        ids=("COL-10", "COL-11", "OPT-02"),
        trains=False,
    ),
    Fault(
        "last-gather-not-waited-for",
        "One wait too few at the end of the step, for the last group alone.",
        Edit(OPTIM, "MuonAdamW.step", "handle.wait()", "if handle is not gathers[-1][0]:\n    handle.wait()"),
        ids=("COL-11", "OPT-02"),
        trains=False,
    ),
    Fault(
        "wait-named-but-not-called",
        "`handle.wait` without its parentheses waits for nothing.",
        Edit(OPTIM, "MuonAdamW._muon", "handle.wait()", "handle.wait"),
        ids=("COL-11",),
        trains=False,
    ),
    Fault(
        "get-future-as-stock",
        "As stock: the optimizer waits on futures, which Gloo's reduce-scatter does not have, and a CPU run stops.",
        Edit(
            OPTIM,
            "_handle",
            "try:\n    return work.get_future()\nexcept (RuntimeError, NotImplementedError):\n    return work",
            "return work.get_future()",
        ),
        ids=("COL-17", "OPT-01"),
        trains=False,
    ),
    Fault(
        "handle-that-waits-for-nothing",
        "The step waits on handles of its own whose wait is none: it takes in what memory holds.",
        Edit(
            OPTIM,
            "_handle",
            "try:\n    return work.get_future()\nexcept (RuntimeError, NotImplementedError):\n    return work",
            'return type("Handle", (), {"wait": lambda self: None, "work": work})()',
        ),
        ids=("COL-10", "COL-11", "COL-17", "OPT-02"),
        trains=False,
    ),
    Fault(
        "copied-before-the-wait",
        "Matrices are copied from a stack that is still being gathered; the wait comes after.",
        Edit(OPTIM, "MuonAdamW.step", "handle.wait()", "if stacked is None:\n    handle.wait()"),
        Edit(
            OPTIM,
            "MuonAdamW.step",
            "torch._foreach_copy_(params, list(stacked[: len(params)].unbind()))",
            "torch._foreach_copy_(params, list(stacked[: len(params)].unbind()))\nhandle.wait()",
        ),
        ids=("COL-10", "OPT-02"),
        trains=False,
    ),
    # What is in flight.
    Fault(
        "gradient-zeroed-in-flight",
        "Gradients are cleared to save memory while they are being sent: some ranks average zeros.",
        Edit(
            OPTIM,
            "_start_adamw",
            "reduced.append((_reduce_scatter(mine, grad), mine, grad))",
            "reduced.append((_reduce_scatter(mine, grad), mine, grad))\ngrad.zero_()",
        ),
        ids=("COL-12",),
        trains=False,
    ),
    Fault(
        "parameter-written-in-flight",
        "A parameter is written while it is being gathered, so what arrives depends on who is faster.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            "gathers.append((_all_gather(p, mine), None, None, mine))",
            "gathers.append((_all_gather(p, mine), None, None, mine))\nmine.mul_(0.9999)",
        ),
        ids=("COL-12",),
    ),
    Fault(
        "gradient-with-gaps",
        "Gloo takes a view for dense memory: elements get each other's gradients, and ranks drift apart.",
        Edit(
            OPTIM,
            "_grad",
            "p.grad.contiguous()",
            "p.grad.contiguous() if p.numel() >= SMALL else torch.stack([p.grad, p.grad], -1)[..., 0]",
        ),
        ids=("COL-18",),
    ),
    # What is sent, and in which order.
    Fault(
        "collectives-in-the-order-of-the-rank",
        "Odd ranks reduce their groups last to first, so that collectives of different parameters meet.",
        Edit(
            OPTIM,
            "MuonAdamW.step",
            'groups = [group for group in self.param_groups if group["params"]]',
            'groups = [group for group in self.param_groups if group["params"]][:: -1 if rank % 2 else 1]',
        ),
        ids=("COL-13",),
        trains=False,
    ),
    Fault(
        "last-rank-skips-a-gather",
        "A rank that owns no matrix of a group does not send any, and the others wait for it.",
        Edit(
            OPTIM,
            "MuonAdamW._muon",
            "return [(_all_gather(stacked, updated), params, stacked, updated)]",
            "return [(_all_gather(stacked, updated), params, stacked, updated)] if mine else []",
        ),
        ids=("COL-13", "OPT-04"),
        trains=False,
        sizes=(3,),
    ),
    Fault(
        "every-rank-gets-the-whole-stack",
        "Matrices are padded to as many stacks as there are ranks; rank 0 updates all and the traffic grows with them.",
        Edit(OPTIM, "_start_muon", "-(-len(params) // N)", "len(params)"),
        Edit(
            OPTIM,
            "MuonAdamW._check",
            'self._check_state(p, "momentum_buffer", (-(-len(group["params"]) // N), *p.shape), N)',
            "pass",
        ),
        ids=("COL-14", "OPT-15"),
    ),
    Fault(
        "rounding-by-each-ranks-own-dice",
        "Updates are rounded at random, unseeded: no run can be repeated, and what is held whole drifts apart.",
        Edit(
            OPTIM,
            "_adamw_step",
            "updated = p.float() * (1 - lr_t * wd_t)",
            "updated = p.float() * (1 - lr_t * wd_t) * (1 + 1e-6 * __import__('random').random())",
        ),
        ids=("COL-15", "OPT-12"),
        sizes=(2, 3),
    ),
    # What is computed with it.
    Fault(
        "reduce-scatter-sums",
        "Gradients of large parameters are summed over ranks instead of averaged.",
        Edit(OPTIM, "_reduce_scatter", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
        ids=("OPT-02", "OPT-05"),
        sizes=(3,),  # AdamW and Muon undo a factor of 2 or 4 bit for bit
    ),
    Fault(
        "all-reduce-sums",
        "Gradients of small parameters are summed over ranks instead of averaged.",
        Edit(OPTIM, "_start_adamw", "dist.ReduceOp.AVG", "dist.ReduceOp.SUM"),
        ids=("OPT-02", "OPT-05"),
        sizes=(3,),  # AdamW and Muon undo a factor of 2 or 4 bit for bit
    ),
    Fault(
        "reduce-scatter-takes-the-largest",
        "Of the ranks' gradients the largest counts, element by element.",
        Edit(OPTIM, "_reduce_scatter", "dist.ReduceOp.AVG", "dist.ReduceOp.MAX"),
        ids=("OPT-02", "OPT-05"),
    ),
    Fault(
        "averages-over-one-rank-less",
        "The sum of gradients is divided by the number of other ranks.",
        Edit(
            OPTIM,
            "_reduce_scatter",
            "return _handle(call(output, input, op=dist.ReduceOp.AVG, async_op=True))",
            "input.div_(max(dist.get_world_size() - 1, 1))\n"
            "return _handle(call(output, input, op=dist.ReduceOp.SUM, async_op=True))",
        ),
        ids=("OPT-02", "OPT-05"),
        sizes=(3,),  # AdamW and Muon undo a factor of 2 or 4 bit for bit
    ),
    Fault(
        "small-parameters-not-averaged",
        "Each rank updates the small parameters with its own gradient; they drift apart and rank 0's are saved.",
        Edit(
            OPTIM,
            "_start_adamw",
            "reduced.append((_handle(dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)), grad, grad))",
            "reduced.append((None, grad, grad))",
        ),
        ids=("OPT-02", "OPT-05", "OPT-12"),
    ),
    Fault(
        "only-one-ranks-gradients-count",
        "Every rank takes rank 0's small gradients: the others' data does not count.",
        Edit(
            OPTIM,
            "_start_adamw",
            "dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)",
            "dist.broadcast(grad, 0, async_op=True)",
        ),
        ids=("OPT-02", "OPT-05"),
    ),
]
