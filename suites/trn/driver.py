"""Whole runs in a driver of our own: 24 rows of tokens a step, dealt over ranks and micro-batches.

In ranks: `train` trains the target's own model with its own optimizers; `skip` meets an inf under a GradScaler.
In pytest: `course` is one run, `reorderings` are the runs of one process that differ from it in rounding alone.
"""

import random

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from nanochat_gate import NotTested, Unsupported, exact
from suites.opt.judging import expecting
from suites.steps import FLOAT32, require_observed

CONFIG = {"n_layer": 2}
STEPS = 20
ROWS = 2 * exact.MICRO_BATCHES  # of a step, over all ranks
LENGTH = 16
NOISE = 0.02
# Into how many parts, each averaged as a rank would, the reorderings of one process divide their micro-batches. A loss
# divided by 12, 6 and 3 has the same bits but for the exponent and one divided by 4 has not, so 3 comes more often.
PARTS = (3, 1, 3, 2, 3, 4, 3, 1)
# Of a step of 4 micro-batches: divided by 4, 2 and 1, which is exact.
FEW_PARTS = (1, 2, 4, 1, 2, 4, 1, 2)


def rows(step, vocabulary):
    """The step's rows (ROWS, LENGTH + 1): each token has one successor, which nine times in ten is what follows it."""
    generator = torch.Generator().manual_seed(7)
    successor = torch.randperm(vocabulary, generator=generator)
    generator.manual_seed(1000 + step)
    tokens = [torch.randint(vocabulary, (ROWS,), generator=generator)]
    for _ in range(LENGTH):
        strays = torch.rand(ROWS, generator=generator) < 0.1
        other = torch.randint(vocabulary, (ROWS,), generator=generator)
        tokens.append(torch.where(strays, other, successor[tokens[-1]]))
    return torch.stack(tokens, dim=1)


def make(rank, **config):
    """The target's own model and optimizers, with every parameter moved a little off where it starts.

    There half the gradients are zero, and some are nothing but rounding, which AdamW's first steps blow up to its rate.
    What a model keeps in 16 bits for autocast's sake is made fp32. Matrices do not decay: a decay that asks for signs
    jumps where an update is next to nothing.
    """
    torch.manual_seed(42)
    model = rank.target.model(rank.device, **CONFIG, **config)
    for parameter in model.parameters():
        if parameter.element_size() == 2:
            parameter.data = parameter.data.float()
    optimizers = rank.target.optimizers(model, weight_decay=0.0)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter), alpha=NOISE)
    return model, optimizers


def loss_of(rank, model, tokens):
    """The loss on rows of T + 1 tokens; loaders hand out contiguous batches, and models count on it."""
    return rank.target.loss(model, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def set_rates(optimizers, step):
    """The rates of the target, falling linearly over the second half of the run."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group.setdefault("initial_lr", group["lr"])
        group["lr"] = group["initial_lr"] * min(1.0, 2 * (STEPS - step) / STEPS)


def train(rank, plan):
    """A run of STEPS steps on this rank's share of every step's rows.

    plan: micro_batches: how many a step has over all ranks, dealt round-robin; order: a seed that shuffles them; rows:
    a seed that shuffles the rows before; parts: divide this process's share as if among so many ranks; without: a
    micro-batch that the first step leaves out of the gradients; steps: stop after so many; compiled: as the training
    script compiles it.
    Returns the losses (STEPS, micro_batches) in fp64, zero where another rank had the micro-batch; of the first step
    this rank's gradients and the parameters before and after; digests of the parameters at the end.
    """
    count, parts = plan.get("micro_batches", exact.MICRO_BATCHES), plan.get("parts", 1)
    model, optimizers = make(rank)
    named = dict(model.named_parameters())
    if plan.get("compiled"):
        model = torch.compile(model, dynamic=False)
    out = {"before": copies(named)}
    losses = torch.zeros(STEPS, count, dtype=torch.float64)
    for step in range(plan.get("steps", STEPS)):
        tokens, order = rows(step, rank.target.config().vocab_size), list(range(count))
        if "rows" in plan:
            tokens = tokens[torch.randperm(ROWS, generator=torch.Generator().manual_seed(100 * plan["rows"] + step))]
        if "order" in plan:
            shuffle = torch.Generator().manual_seed(100 * plan["order"] + step)
            order = torch.randperm(count, generator=shuffle).tolist()
        batches = tokens.to(rank.device).chunk(count)
        mine = order[rank.rank :: rank.size]
        sums = []
        for part in range(parts):
            share = mine[part::parts]
            for number in share:
                loss = loss_of(rank, model, batches[number])
                if step or number != plan.get("without"):
                    (loss / len(share)).backward()
                losses[step, number] = loss.item()
            sums.append([parameter.grad for parameter in named.values()])
            model.zero_grad(set_to_none=True)
        for parameter, of_parts in zip(named.values(), zip(*sums, strict=True), strict=True):
            grads = [grad for grad in of_parts if grad is not None]
            parameter.grad = sum(grads[1:], grads[0]).div_(parts) if grads else None
        if step == 0:
            out["gradients"] = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named.items()}
        set_rates(optimizers, step)
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step == 0:
            out["after"] = copies(named)
    require_observed(rank)
    if plan.get("compiled") and not torch._dynamo.utils.counters["stats"]["unique_graphs"]:
        raise NotTested("torch compiled nothing here")
    return out | {"losses": losses, "bits": {name: exact.bits(p) for name, p in named.items()}}


def copies(named):
    return {name: parameter.detach().float().cpu().clone() for name, parameter in named.items()}


def flops(rank):
    """Training FLOPs per token: in products with parameters, as torch counts them, in attention to every token, as
    12 per channel (arXiv 2204.02311), and as the target's model estimates them."""
    model, _ = make(rank, window_pattern="L")
    if not hasattr(model, "estimate_flops"):
        raise Unsupported("the target's model has no estimate_flops()")
    config = model.config
    tokens = torch.zeros(2, config.sequence_len + 1, dtype=torch.long, device=rank.device)
    with FlopCounterMode(display=False) as counter:
        loss_of(rank, model, tokens).backward()
    ops = counter.get_flop_counts()["Global"]
    products = sum(count for op, count in ops.items() if str(op) in ("aten.mm", "aten.addmm"))
    attention = 12 * config.n_layer * config.n_embd * config.sequence_len
    where = rank.target.where(type(model).estimate_flops)
    said = {"products": products / (2 * config.sequence_len), "attention": attention}
    return {**said, "estimate": float(model.estimate_flops()), "where": where}


def ignored(rank):
    """The loss of rows whose second half has targets of -1, and that of their first half alone."""
    model, _ = make(rank)
    x, y = rows(0, rank.target.config().vocab_size).to(rank.device).unfold(1, LENGTH, 1).unbind(1)
    half = LENGTH // 2
    alone = loss_of(rank, model, torch.cat([x[:, :half], y[:, half - 1 : half]], dim=1))
    masked = y.clone()
    masked[:, half:] = -1
    try:
        loss = rank.target.loss(model, x.contiguous(), masked)
    except Exception as error:
        raise Unsupported(f"its loss takes no targets of -1: {' '.join(str(error).split())}") from error
    return {"loss": loss.item(), "alone": alone.item(), "where": rank.target.where(type(model).forward)}


def skip(rank):
    """Two steps under a GradScaler; in the first, rank 1's gradients overflow. Bits before and after each; the scale.

    All ranks share what each found as the training script makes them; the second step must then work again.
    """
    if getattr(rank.target.module("common"), "COMPUTE_DTYPE", None) is not torch.float16:
        raise Unsupported("the target cannot be told to compute in float16, the one dtype that is scaled")
    model, optimizers = make(rank)
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=1024.0)
    bits = [{name: exact.bits(p) for name, p in model.named_parameters()}]
    scales = []
    for step in range(2):
        batch = rows(step, rank.target.config().vocab_size).to(rank.device)[rank.rank :: rank.size]
        scaler.scale(loss_of(rank, model, batch)).backward()
        for parameter in model.parameters():
            if step == 0 and rank.rank == 1 and parameter.grad is not None:
                parameter.grad.fill_(float("inf"))
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
            for found in scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, op=dist.ReduceOp.MAX)
            scaler.step(optimizer)
        scaler.update()
        model.zero_grad(set_to_none=True)
        bits.append({name: exact.bits(p) for name, p in model.named_parameters()})
        scales.append(scaler.get_scale())
    return {"bits": bits, "scales": scales}


# ---------------------------------------------------------------------------------------------------------------------
# In pytest.


def course(ranks, size, backend, **plan):
    """What every rank of `size` says of the run `plan`; made once for the whole session."""
    if size == 1:
        return [ranks.single(train, plan, backend=backend, env=FLOAT32)]

    # Withheld results are slow, and other suites' matter; here they stand in for futures that the backend lacks.
    lane = "plain" if ranks.facts.step == "ok" else "withheld"

    def run():
        with expecting("every rank trains to the end"):
            return ranks(train, plan, size=size, backend=backend, lane=lane, env=FLOAT32)

    said = "-".join(f"{key}{value}" for key, value in sorted(plan.items()))
    return ranks.gate.shared(f"trn-{size}-{backend}-{said}", run)


def reorderings(ranks, backend, plans):
    """The single-process runs of `plans`. Each test takes them in an order of its own: tests that run at the same time
    share the work, where otherwise one would wait for the other's."""
    turned = random.Random(ranks.nodeid).sample(plans, len(plans))
    return [course(ranks, 1, backend, **plan)[0] for plan in turned]


def losses(run):
    """The global loss of every step: the mean over all micro-batches of all ranks, in fp64."""
    return sum(rank["losses"] for rank in run).mean(dim=1)
