"""Faults of the optimizer's arithmetic and of how it deals parameters and state to ranks."""

from tests.faults.edit import Edit, Fault

OPTIM = "nanochat/optim.py"
GPT = "nanochat/gpt.py"

# Forks differ in these on purpose.
OWN_CHOICE = "no requirement on a target; tests/test_reference_optimizer.py holds the reference to its formula"

FAULTS = [
    # Which rank has what.
    Fault(
        "adamw-updates-next-ranks-slice",
        "Every rank updates its neighbour's slice of the embeddings with the gradient of its own.",
        Edit(OPTIM, "MuonAdamW._adamw", "p.chunk(N)[rank]", "p.chunk(N)[(rank + 1) % N]"),
        ids=("OPT-02", "OPT-05"),
    ),
    Fault(
        "adamw-gathers-next-ranks-slice",
        "Every rank sends its neighbour's slice of the embeddings, as it was before the step.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            "gathers.append((_all_gather(p, mine), None, None, mine))",
            "mine = p.chunk(N)[(rank + 1) % N].clone()\ngathers.append((_all_gather(p, mine), None, None, mine))",
        ),
        ids=("OPT-02", "OPT-05"),
        trains=False,
    ),
    Fault(
        "muon-updates-the-matrices-of-rank-0",
        "Every rank steps the first matrices with the gradients of its own, and they are dealt out as all.",
        Edit(
            OPTIM,
            "MuonAdamW._muon",
            "params[rank * chunk : (rank + 1) * chunk]",
            "params[: len(params[rank * chunk : (rank + 1) * chunk])]",
        ),
        ids=("OPT-02", "OPT-04"),
    ),
    Fault(
        "only-rank-0-updates-matrices",
        "The other ranks' matrices keep their initial weights.",
        Edit(
            OPTIM,
            "MuonAdamW._muon",
            '_t(group["lr"] * max(1.0, m / n) ** 0.5)',
            '_t(group["lr"] * max(1.0, m / n) ** 0.5 * (rank == 0))',
        ),
        ids=("OPT-02", "OPT-04"),
    ),
    Fault(
        "momentum-lost-on-rank-1",
        "On one rank the momentum is that of a copy, and starts from nothing at every step.",
        Edit(
            OPTIM,
            "MuonAdamW._muon",
            'state["momentum_buffer"][:K]',
            '(state["momentum_buffer"][:K].clone() if rank == 1 else state["momentum_buffer"][:K])',
        ),
        ids=("OPT-02", "OPT-04"),
    ),
    Fault(
        "matrices-left-over-not-updated",
        "Matrices beyond the last whole share stay as they are, at depths that do not divide by the ranks.",
        Edit(
            OPTIM,
            "MuonAdamW._muon",
            "return [(_all_gather(stacked, updated), params, stacked, updated)]",
            "return [(_all_gather(stacked, updated), params[: max(len(params) // N * N, 1)], stacked, updated)]",
        ),
        ids=("OPT-04",),
    ),
    Fault(
        "rows-left-over-not-updated",
        "The last rows of a vocabulary that does not divide by the ranks never learn, and nobody is told.",
        Edit(OPTIM, "MuonAdamW._check", "sharded and p.size(0) % N", "False"),
        Edit(
            OPTIM,
            "_start_adamw",
            "mine = torch.empty_like(grad.chunk(N)[0])",
            "grad = grad[: len(grad) // N * N].contiguous()\nmine = torch.empty_like(grad.chunk(N)[0])",
        ),
        Edit(OPTIM, "MuonAdamW._adamw", "p.chunk(N)[rank]", "p[: len(p) // N * N].chunk(N)[rank]"),
        Edit(OPTIM, "MuonAdamW._adamw", "_all_gather(p, mine)", "_all_gather(p[: len(p) // N * N], mine)"),
        ids=("OPT-06",),
    ),
    Fault(
        "uneven-rows-not-refused",
        "A dim 0 that does not divide by the ranks ends in an error of torch's, with collectives in flight.",
        Edit(OPTIM, "MuonAdamW._check", "sharded and p.size(0) % N", "False"),
        ids=("OPT-07", "OPT-08"),
        sizes=(2, 3),
    ),
    Fault(
        "vocabulary-not-padded",
        "As stock once did: a vocabulary that does not divide by the ranks cannot be trained.",
        Edit(
            GPT,
            "GPT.__init__",
            "-(-config.vocab_size // pad_vocab_size_to) * pad_vocab_size_to",
            "config.vocab_size",
        ),
        ids=("OPT-03",),
    ),
    Fault(
        "state-not-sharded",
        "Every rank keeps the state of all embeddings, and memory does not shrink with more ranks.",
        Edit(OPTIM, "", "SMALL = 1024", "SMALL = 1 << 40"),
        ids=("OPT-15",),
    ),
    Fault(
        "one-matrix-too-many-per-rank",
        "Shares are a matrix larger than they need be: more memory, more traffic, and the same weights.",
        Edit(OPTIM, "_start_muon", "-(-len(params) // N)", "len(params) // N + 1"),
        Edit(
            OPTIM,
            "MuonAdamW._check",
            'self._check_state(p, "momentum_buffer", (-(-len(group["params"]) // N), *p.shape), N)',
            "pass",
        ),
        ids=("OPT-15", "COL-14"),
    ),
    Fault(
        "missing-gradients-left-out",
        "A rank whose batch reached no gradient of a parameter takes part in fewer collectives than the others.",
        Edit(
            OPTIM,
            "_start_adamw",
            'group["params"]',
            '[p for p in group["params"] if p.grad is not None]',
        ),
        ids=("OPT-13",),
    ),
    # AdamW.
    Fault(
        "adamw-bias-correction-dropped",
        "The first steps of AdamW come out several times too large.",
        Edit(OPTIM, "_adamw_step", "bias2 = 1 - beta2_t**step_t", "bias2 = 1.0"),
        ids=("OPT-16",),
    ),
    Fault(
        "adamw-counts-steps-from-2",
        "Bias correction is that of the next step.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            "state.update(step=0, exp_avg=torch.zeros_like(mine), exp_avg_sq=torch.zeros_like(mine))",
            "state.update(step=1, exp_avg=torch.zeros_like(mine), exp_avg_sq=torch.zeros_like(mine))",
        ),
        ids=("OPT-16",),
    ),
    Fault(
        "adamw-betas-swapped",
        "The two averages of AdamW take each other's decay.",
        Edit(OPTIM, "MuonAdamW._adamw", 'map(_t, group["betas"])', 'map(_t, group["betas"][::-1])'),
        ids=("OPT-16",),
    ),
    Fault(
        "adamw-decay-grows-weights",
        "Weight decay has the wrong sign.",
        Edit(OPTIM, "_adamw_step", "1 - lr_t * wd_t", "1 + lr_t * wd_t"),
        ids=("OPT-16",),
    ),
    Fault(
        "adamw-decay-without-the-rate",
        "Weight decay is not scaled by the learning rate, and overwhelms a run as the rate falls.",
        Edit(OPTIM, "_adamw_step", "1 - lr_t * wd_t", "1 - 0.01 * wd_t"),
        ids=("OPT-16",),
    ),
    Fault(
        "adamw-decay-in-the-gradient",
        "Adam with L2 instead of AdamW: parameters with large gradients hardly decay.",
        Edit(OPTIM, "_adamw_step", "g = grad.float()", "g = grad.float() + wd_t * p.float()"),
        Edit(OPTIM, "_adamw_step", "p.float() * (1 - lr_t * wd_t)", "p.float() * 1.0"),
        ids=("OPT-16",),
    ),
    Fault(
        "adamw-eps-inside-the-root",
        "An eps of 1e-10 counts as one of 1e-5.",
        Edit(OPTIM, "_adamw_step", "(v / bias2).sqrt() + eps_t", "(v / bias2 + eps_t).sqrt()"),
        ids=("OPT-17",),
    ),
    Fault(
        "adamw-eps-before-the-correction",
        "A large eps counts for more in the first steps, as eps / sqrt(1 - beta2^t).",
        Edit(OPTIM, "_adamw_step", "(v / bias2).sqrt() + eps_t", "(v.sqrt() + eps_t) / bias2**0.5"),
        ids=("OPT-17",),
    ),
    Fault(
        "adamw-ignores-the-schedule",
        "AdamW keeps the learning rate of its first step: no warmup, no warmdown.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            '_t(group["lr"])',
            '_t(group.setdefault("first_lr", group["lr"]))',
        ),
        ids=("OPT-16",),
    ),
    Fault(
        "gradients-rounded-to-bf16",
        "Gradients are sent in 8 bits to save traffic; small ones are lost in the average.",
        Edit(OPTIM, "_grad", "p.grad.contiguous()", "p.grad.bfloat16().to(p.dtype).contiguous()"),
        ids=("OPT-16",),
    ),
    Fault(
        "second-moment-in-bf16",
        "The average of squares of bf16 parameters forgets at another rate than was set.",
        Edit(
            OPTIM,
            "_adamw_step",
            "exp_avg_sq.float().lerp(g.square(), 1 - beta2_t)",
            "exp_avg_sq.lerp(grad.square(), 1 - beta2_t.to(grad.dtype)).float()",
        ),
        ids=("OPT-10",),
    ),
    # Muon.
    Fault(
        "muon-nesterov-dropped",
        "Muon steps along the averaged gradient of the past instead of looking ahead, and converges more slowly.",
        Edit(OPTIM, "_muon_step", "grads.lerp(momentum_buffer, momentum)", "momentum_buffer.clone()"),
        ids=("OPT-21",),
    ),
    Fault(
        "muon-momentum-lost",
        "Muon keeps no gradients of the past: each step is as noisy as its batch.",
        Edit(
            OPTIM,
            "_muon_step",
            "momentum_buffer.lerp_(grads, 1 - momentum)",
            "momentum_buffer.copy_(grads * (1 - momentum))",
        ),
        ids=("OPT-20",),
    ),
    Fault(
        "muon-momentum-not-scheduled",
        "Muon keeps its momentum of 0.95 whatever the schedule says.",
        Edit(OPTIM, "MuonAdamW._muon", '_t(group["momentum"])', "_t(0.95)"),
        ids=("OPT-20",),
    ),
    Fault(
        "muon-rate-not-scaled-by-shape",
        "Tall matrices learn at half the rate they were tuned for.",
        Edit(OPTIM, "MuonAdamW._muon", 'group["lr"] * max(1.0, m / n) ** 0.5', 'group["lr"]'),
        ids=("OPT-18",),
    ),
    Fault(
        "muon-rate-scaled-the-other-way",
        "Wide matrices learn at the rate of tall ones and tall ones at that of wide ones.",
        Edit(OPTIM, "MuonAdamW._muon", "max(1.0, m / n)", "max(1.0, n / m)"),
        ids=("OPT-18",),
    ),
    Fault(
        "muon-stops-after-one-iteration",
        "Updates are hardly orthogonalised: the largest direction of a gradient drowns the others.",
        Edit(OPTIM, "_muon_step", "polar_express_coeffs[:ns_steps]", "polar_express_coeffs[:1]"),
        ids=("OPT-18",),
    ),
    Fault(
        "muon-goes-uphill",
        "Matrices are moved against their gradient; embeddings and head still learn, so the loss falls.",
        Edit(OPTIM, "_muon_step", "lr * g + lr * wd * params * agrees", "lr * wd * params * agrees - lr * g"),
        ids=("OPT-19",),
    ),
    Fault(
        "muon-decay-grows-weights",
        "Muon's weight decay has the wrong sign.",
        Edit(OPTIM, "_muon_step", "lr * g + lr * wd * params * agrees", "lr * g - lr * wd * params * agrees"),
        ids=("OPT-23",),
    ),
    Fault(
        "muon-decay-without-the-rate",
        "Muon's weight decay is not scaled by the learning rate.",
        Edit(OPTIM, "_muon_step", "lr * wd * params * agrees", "wd * params * agrees"),
        ids=("OPT-23",),
    ),
    Fault(
        "muon-decay-dropped",
        "Matrices do not decay at all.",
        Edit(OPTIM, "_muon_step", "lr * g + lr * wd * params * agrees", "lr * g"),
        ids=("OPT-23",),
    ),
    Fault(
        "muon-decay-where-it-disagrees",
        "Weights decay just where the update moves them outwards.",
        Edit(OPTIM, "_muon_step", "(g * params) >= 0", "(g * params) < 0"),
        ids=(),
        uncaught=OWN_CHOICE,
    ),
    Fault(
        "normuon-along-the-wrong-dim",
        "The variance of an update is averaged over rows where it should be over columns.",
        Edit(OPTIM, "MuonAdamW._muon", "-1 if m >= n else -2", "-2 if m >= n else -1"),
        ids=(),
        uncaught=OWN_CHOICE,
    ),
    Fault(
        "normuon-second-moment-frozen",
        "The variance per neuron is that of the first step for ever.",
        Edit(
            OPTIM,
            "_muon_step",
            "second_buffer.lerp_(v.to(second_buffer.dtype), 1 - beta2_t.to(second_buffer.dtype))",
            "second_buffer.lerp_(v.to(second_buffer.dtype), (1 - beta2_t.to(second_buffer.dtype)) "
            "* (second_buffer == 0).all())",
        ),
        ids=(),
        uncaught=OWN_CHOICE,
    ),
    # What a stack or a run shares that a matrix or a step should have of its own.
    Fault(
        "muon-length-over-the-stack",
        "The norm before the polar factor is the whole stack's: small matrices are hardly orthogonalised.",
        Edit(OPTIM, "_muon_step", "X.norm(dim=(-2, -1), keepdim=True)", "X.norm()"),
        ids=("OPT-24",),
    ),
    Fault(
        "muon-rate-over-the-stack",
        "The norm after the polar factor is the whole stack's: matrices learn more slowly the fewer ranks there are.",
        Edit(OPTIM, "_muon_step", "g.norm(dim=(-2, -1), keepdim=True)", "g.norm()"),
        ids=("OPT-24",),
    ),
    Fault(
        "muon-decay-of-the-first-step",
        "The tensor with Muon's weight decay is made once and never filled again.",
        Edit(
            OPTIM,
            "MuonAdamW._muon",
            '_t(group["weight_decay"])',
            'state.setdefault("wd_t", _t(group["weight_decay"]))',
        ),
        ids=("OPT-23",),
    ),
    Fault(
        "adamw-counts-in-bf16",
        "The step count has the parameter's dtype, and for bf16 stays at 256.",
        Edit(
            OPTIM,
            "MuonAdamW._adamw",
            "state.update(step=0, exp_avg=torch.zeros_like(mine), exp_avg_sq=torch.zeros_like(mine))",
            "state.update(step=mine.new_zeros(()), exp_avg=torch.zeros_like(mine), exp_avg_sq=torch.zeros_like(mine))",
        ),
        Edit(OPTIM, "MuonAdamW._adamw", '_t(state["step"])', 'state["step"].float()'),
        ids=("OPT-25",),
    ),
]
