"""MuonAdamW: AdamW for embeddings, head and scalars, Muon for matrices, on one rank or many.

There is no DistributedDataParallel: step() averages the gradients over the ranks itself and shards the optimizer's
state (as ZeRO does, arXiv 1910.02054). A step has three phases, so that communication overlaps with computation:
start every reduce; then, group by group, wait for it, update this rank's share and start its gather; wait for the
gathers.
"""

import functools
import os

import torch
import torch.distributed as dist

from nanochat import common

SMALL = 1024  # AdamW parameters with fewer elements are updated whole on every rank

# ---------------------------------------------------------------------------------------------------------------------
# The arithmetic of one update. What changes from step to step comes as 0-d fp32 tensors, so that compiled code stays.


def _compiles(tensor):
    return tensor.is_cuda or os.environ.get("NANOCHAT_COMPILE", "") == "1"


@functools.cache
def _compiled(function):
    return torch.compile(function, dynamic=False, fullgraph=True)


def adamw_step_fused(p, grad, exp_avg, exp_avg_sq, step_t, lr_t, beta1_t, beta2_t, eps_t, wd_t):
    """One AdamW update (arXiv 1711.05101), in place on p, exp_avg and exp_avg_sq, all of grad's shape.

    step_t counts from 1. Decay is decoupled: p *= 1 - lr * wd, before the update. Computes in fp32 and writes back in
    the dtype of each tensor. Compiled on CUDA, and elsewhere with NANOCHAT_COMPILE=1.
    """
    run = _compiled(_adamw_step) if _compiles(p) else _adamw_step
    run(p, grad, exp_avg, exp_avg_sq, step_t, lr_t, beta1_t, beta2_t, eps_t, wd_t)


def _adamw_step(p, grad, exp_avg, exp_avg_sq, step_t, lr_t, beta1_t, beta2_t, eps_t, wd_t):
    g = grad.float()
    updated = p.float() * (1 - lr_t * wd_t)
    m = exp_avg.float().lerp(g, 1 - beta1_t)
    v = exp_avg_sq.float().lerp(g.square(), 1 - beta2_t)
    bias1 = 1 - beta1_t**step_t
    bias2 = 1 - beta2_t**step_t
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)
    p.copy_(updated.add_(m / ((v / bias2).sqrt() + eps_t), alpha=-(lr_t / bias1)))


# Polar Express (arXiv 2505.16932): 5 iterations, safety 2e-2, cushion 2.
polar_express_coeffs = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def muon_step_fused(
    stacked_grads, stacked_params, momentum_buffer, second_momentum_buffer,
    momentum_t, lr_t, wd_t, beta2_t, ns_steps, red_dim,
):  # fmt: skip
    """One Muon update (kellerjordan.github.io/posts/muon) of K matrices (K, m, n), in place on all but the gradients.

    Nesterov momentum; rows brought to one norm (MuonEq, arXiv 2603.28254); the polar factor by `ns_steps` <= 5 Polar
    Express steps, at a fixed norm (Muon+, arXiv 2602.21545); a variance per row or column (NorMuon, arXiv 2510.05491);
    weight decay only where it agrees with the update. `red_dim` is the dim that the variance is a mean over: -1 with
    second_momentum_buffer (K, m, 1), or -2 with (K, 1, n). Compiled like adamw_step_fused.
    """
    run = _compiled(_muon_step) if _compiles(stacked_params) else _muon_step
    run(
        stacked_grads, stacked_params, momentum_buffer, second_momentum_buffer,
        momentum_t, lr_t, wd_t, beta2_t, ns_steps, red_dim,
    )  # fmt: skip


def _muon_step(grads, params, momentum_buffer, second_buffer, momentum_t, lr_t, wd_t, beta2_t, ns_steps, red_dim):
    m, n = params.shape[-2:]
    momentum = momentum_t.to(grads.dtype)
    momentum_buffer.lerp_(grads, 1 - momentum)
    g = grads.lerp(momentum_buffer, momentum)

    X = g.bfloat16() if common.COMPUTE_DTYPE is torch.bfloat16 else g
    row_norms = X.float().norm(dim=-1, keepdim=True)
    mean_norm = X.float().norm(dim=(-2, -1), keepdim=True) / m**0.5
    X = X * (mean_norm / row_norms.clamp_min(1e-6)).to(X.dtype)
    X = X / (1e-6 + 1.01 * X.norm(dim=(-2, -1), keepdim=True))
    for a, b, c in polar_express_coeffs[:ns_steps]:
        if m > n:
            A = X.mT @ X
            X = a * X + X @ (b * A + c * (A @ A))
        else:
            A = X @ X.mT
            X = a * X + (b * A + c * (A @ A)) @ X
    g = X.to(params.dtype)
    g = g * (min(m, n) ** 0.5 / g.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-6))

    d = g.size(red_dim)
    v = g.float().square().mean(dim=red_dim, keepdim=True)
    old_norm = (v.sum(dim=(-2, -1), keepdim=True) * d).sqrt()
    second_buffer.lerp_(v.to(second_buffer.dtype), 1 - beta2_t.to(second_buffer.dtype))
    scale = second_buffer.clamp_min(1e-10).rsqrt()
    new_norm = (v * d * scale.float().square()).sum(dim=(-2, -1), keepdim=True).sqrt()
    g = g * (scale * (old_norm / new_norm.clamp_min(1e-10))).to(g.dtype)

    lr, wd = lr_t.to(g.dtype), wd_t.to(g.dtype)
    agrees = (g * params) >= 0
    params.sub_(lr * g + lr * wd * params * agrees)


# ---------------------------------------------------------------------------------------------------------------------
# Communication. torch 2.13 renamed two collectives and warns about the old names.


def _reduce_scatter(output, input):
    call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return _handle(call(output, input, op=dist.ReduceOp.AVG, async_op=True))


def _all_gather(output, input):
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return _handle(call(output, input, async_op=True))


def _handle(work):
    """Something to wait() on: the work's future, or the work itself, since Gloo's reduce-scatter has no future."""
    try:
        return work.get_future()
    except (RuntimeError, NotImplementedError):
        return work


def _grad(p):
    """The gradient, or zeros where backward() reached none: every rank must take part in the same collectives."""
    return torch.zeros_like(p) if p.grad is None else p.grad.contiguous()


def _t(value):
    return torch.tensor(value, dtype=torch.float32)


# ---------------------------------------------------------------------------------------------------------------------


class MuonAdamW(torch.optim.Optimizer):
    """AdamW and Muon over the default process group, or over one rank where there is none.

    Groups have `kind` "adamw" (params, lr, betas, eps, weight_decay) or "muon" (params: matrices of one shape, lr,
    momentum, ns_steps, beta2, weight_decay). All ranks must hold equal parameters in equal order.

    A parameter without a gradient, on one rank or all, counts as one with a gradient of zeros: its momentum goes on
    and it decays. State of AdamW parameters of 1024 elements or more is this rank's 1/N slice along dim 0; Muon's is
    that of this rank's matrices, under the group's first parameter. So state fits the world size it was made with.
    """

    def __init__(self, param_groups):
        super().__init__(param_groups, defaults={})

    def add_param_group(self, param_group):
        """Raises ValueError for an unknown kind, and for a Muon group that is not matrices of one shape."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group.get("kind") not in ("adamw", "muon"):
            raise ValueError(f"A parameter group has kind {group.get('kind')!r}: expected 'adamw' or 'muon'.")
        shapes = sorted({tuple(p.shape) for p in group["params"]})
        if group["kind"] == "muon" and (len(shapes) > 1 or any(len(shape) != 2 for shape in shapes)):
            raise ValueError(f"A Muon group has shapes {shapes}: expected matrices of one shape: make a group of each.")

    @torch.no_grad()
    def step(self):
        """Average the gradients over the ranks and update every parameter, equally on all of them.

        Raises ValueError, before anything is sent or updated, when a parameter cannot be dealt to the ranks or the
        state is not this world size's.
        """
        grouped = dist.is_available() and dist.is_initialized()
        rank, N = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        groups = [group for group in self.param_groups if group["params"]]
        for group in groups:
            self._check(group, N)
        reduces = [_start_muon(group, N) if group["kind"] == "muon" else _start_adamw(group, N) for group in groups]
        gathers = []
        for group, reduced in zip(groups, reduces, strict=True):
            update = self._muon if group["kind"] == "muon" else self._adamw
            gathers += update(group, reduced, rank, N)
        for handle, params, stacked, _sent in gathers:  # what was sent must live until the gather is through
            handle.wait()
            if stacked is not None:
                torch._foreach_copy_(params, list(stacked[: len(params)].unbind()))

    def _check(self, group, N):
        if group["kind"] == "adamw":
            for i, p in enumerate(group["params"]):
                sharded = N > 1 and p.numel() >= SMALL
                if sharded and p.size(0) % N:
                    raise ValueError(
                        f"AdamW parameter {i} of its group has shape {tuple(p.shape)}, whose dim 0, {p.size(0)}, does "
                        f"not divide by {N} ranks: pad it (a vocabulary by pad_vocab_size_to) or use other ranks."
                    )
                shape = (p.size(0) // N, *p.shape[1:]) if sharded else tuple(p.shape)
                self._check_state(p, "exp_avg", shape, N)
        else:
            p = group["params"][0]
            self._check_state(p, "momentum_buffer", (-(-len(group["params"]) // N), *p.shape), N)

    def _check_state(self, p, key, shape, N):
        state = self.state.get(p)
        have = tuple(state[key].shape) if state else shape
        if have != shape:
            raise ValueError(
                f"{key} of a parameter {tuple(p.shape)} has shape {have} where {N} ranks need {shape}: "
                "load optimizer state at the world size it was saved with."
            )

    def _adamw(self, group, reduced, rank, N):
        gathers = []
        lr, eps, wd = _t(group["lr"]), _t(group["eps"]), _t(group["weight_decay"])
        beta1, beta2 = map(_t, group["betas"])
        for p, (handle, grad, _sent) in zip(group["params"], reduced, strict=True):
            if handle is not None:
                handle.wait()
            sharded = N > 1 and p.numel() >= SMALL
            mine = p.chunk(N)[rank] if sharded else p
            state = self.state[p]
            if not state:
                state.update(step=0, exp_avg=torch.zeros_like(mine), exp_avg_sq=torch.zeros_like(mine))
            state["step"] += 1
            adamw_step_fused(
                mine, grad, state["exp_avg"], state["exp_avg_sq"], _t(state["step"]), lr, beta1, beta2, eps, wd
            )
            if sharded:
                gathers.append((_all_gather(p, mine), None, None, mine))
        return gathers

    def _muon(self, group, reduced, rank, N):
        params = group["params"]
        p = params[0]
        m, n = p.shape
        red_dim = -1 if m >= n else -2
        handle, grads, stacked = reduced
        if handle is not None:
            handle.wait()
        chunk = grads.size(0)
        state = self.state[p]
        if not state:
            second = (chunk, m, 1) if red_dim == -1 else (chunk, 1, n)
            state["momentum_buffer"] = torch.zeros_like(grads)
            state["second_momentum_buffer"] = torch.zeros(second, dtype=p.dtype, device=p.device)
        mine = params[rank * chunk : (rank + 1) * chunk]  # shorter than chunk, or empty, on the last ranks
        K = len(mine)
        updated = torch.zeros_like(grads)
        if mine:
            torch.stack(mine, out=updated[:K])
            muon_step_fused(
                grads[:K], updated[:K], state["momentum_buffer"][:K], state["second_momentum_buffer"][:K],
                _t(group["momentum"]), _t(group["lr"] * max(1.0, m / n) ** 0.5), _t(group["weight_decay"]),
                _t(group["beta2"]), group["ns_steps"], red_dim,
            )  # fmt: skip
        if N == 1:
            torch._foreach_copy_(params, list(updated.unbind()))
            return []
        return [(_all_gather(stacked, updated), params, stacked, updated)]


def _start_adamw(group, N):
    """Start averaging: per parameter (handle or None, this rank's gradient, what was sent)."""
    reduced = []
    for p in group["params"]:
        grad = _grad(p)
        if N == 1:
            reduced.append((None, grad, grad))
        elif p.numel() < SMALL:
            reduced.append((_handle(dist.all_reduce(grad, op=dist.ReduceOp.AVG, async_op=True)), grad, grad))
        else:
            mine = torch.empty_like(grad.chunk(N)[0])
            reduced.append((_reduce_scatter(mine, grad), mine, grad))
    return reduced


def _start_muon(group, N):
    """Start averaging a stack of matrices: (handle, this rank's gradients, the stack, free for the gather)."""
    params = group["params"]
    chunk = -(-len(params) // N)
    stacked = params[0].new_zeros(chunk * N, *params[0].shape)
    torch.stack([_grad(p) for p in params], out=stacked[: len(params)])
    if N == 1:
        return None, stacked, stacked
    mine = torch.empty_like(stacked[:chunk])
    return _reduce_scatter(mine, stacked), mine, stacked
