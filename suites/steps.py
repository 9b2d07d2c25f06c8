"""Optimizer steps on exact gradients, shared by the COL and OPT suites: what every rank of a world runs."""

from nanochat_gate import Unsupported, exact

# Per step: factor on every group's lr, Muon momentum, factor on weight decay; the training script changes all three.
SCHEDULE = [(1.0, 0.85, 1.0), (0.5, 0.9, 0.75), (1.0, 0.97, 0.5), (0.25, 0.95, 0.25), (0.0625, 0.9, 0.0)]
# Arithmetic in bf16 may give a matrix other bits in a stack of one height than in another; what is compared bit for
# bit runs in fp32 where the target lets us choose.
FLOAT32 = {"NANOCHAT_DTYPE": "float32"}


def set_schedule(optimizers, step):
    """Change lr, momentum and weight decay between steps as a schedule does; keys a target lacks stay alone."""
    lr_factor, momentum, decay_factor = SCHEDULE[step % len(SCHEDULE)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
            group.setdefault("initial_weight_decay", group.get("weight_decay", 0.0))
            group["lr"] = group["initial_lr"] * lr_factor
            if "momentum" in group:
                group["momentum"] = momentum
            if "weight_decay" in group:
                group["weight_decay"] = group["initial_weight_decay"] * decay_factor


def gradient(shape, dtype, rank, size, step, name):
    """The exact gradient that rank `rank` of `size` brings for a parameter of `dtype` ("bfloat16"), as fp32."""
    limit = exact.LIMIT_16_BIT if dtype in ("bfloat16", "float16") else 64
    return exact.dealt(shape, rank, size, step, name, limit=limit)


def set_gradients(rank, named, step):
    """Give each parameter the exact gradient of this rank's share of the step's micro-batches."""
    for name, parameter in named.items():
        dtype = str(parameter.dtype).removeprefix("torch.")
        mine = gradient(parameter.shape, dtype, rank.rank, rank.size, step, name)
        parameter.grad = mine.to(device=parameter.device, dtype=parameter.dtype)


def run_steps(rank, named, optimizers, steps):
    """`steps` steps under the schedule on exact gradients; the named parameters after each step."""
    after = []
    for step in range(steps):
        set_schedule(optimizers, step)
        set_gradients(rank, named, step)
        for optimizer in optimizers:
            optimizer.step()
        for parameter in named.values():
            parameter.grad = None
        after.append({name: p.detach().clone().cpu() for name, p in named.items()})
    return after


def make_model(rank, config=None):
    """The target's own model and optimizers, with equal weights everywhere whatever compute_init does."""
    import torch

    torch.manual_seed(42)
    model = rank.target.model(rank.device, **(config or {}))
    return model, rank.target.optimizers(model, weight_decay=0.1)


def model_steps(rank, steps, config=None):
    """`steps` optimizer steps of the target's own model and setup; returns its parameters after each step."""
    model, optimizers = make_model(rank, config)
    return run_steps(rank, dict(model.named_parameters()), optimizers, steps)


def require_observed(rank):
    """Refuse to call withheld results right when some collectives went past the wrappers that withhold them."""
    if rank.recorder.withhold and rank.recorder.bypassed:
        count, first = len(rank.recorder.bypassed), rank.recorder.bypassed[0]
        raise Unsupported(f"unobserved: {count} collectives do not pass torch.distributed's functions, e.g. {first}")
