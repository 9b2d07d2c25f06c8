"""Optimizer steps on exact gradients, shared by the COL and OPT suites: what every rank of a world runs."""

from nanochat_gate import exact

# Per step: factor on every group's lr, Muon momentum, factor on weight decay; the training script changes all three.
SCHEDULE = [(1.0, 0.85, 1.0), (0.5, 0.9, 0.75), (1.0, 0.97, 0.5), (0.25, 0.95, 0.25), (0.0625, 0.9, 0.0)]


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


def set_gradients(rank, named, step):
    """Give each parameter the exact gradient of this rank's share of the step's micro-batches."""
    for name, parameter in named.items():
        limit = 64 if parameter.element_size() > 2 else exact.LIMIT_16_BIT
        gradient = exact.dealt(parameter.shape, rank.rank, rank.size, step, name, limit=limit)
        parameter.grad = gradient.to(device=parameter.device, dtype=parameter.dtype)


def model_steps(rank, steps, config=None):
    """`steps` optimizer steps of the target's own model and setup; returns its parameters after each step.

    The model is made with the same seed everywhere, so weights are equal at the start whatever compute_init does.
    """
    import torch

    torch.manual_seed(42)
    model = rank.target.model(rank.device, **(config or {}))
    optimizers = rank.target.optimizers(model, weight_decay=0.1)
    named = dict(model.named_parameters())
    after = []
    for step in range(steps):
        set_schedule(optimizers, step)
        set_gradients(rank, named, step)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        after.append({name: p.detach().clone().cpu() for name, p in named.items()})
    return after
