"""What follows from the training flags: the model's shape, the number of steps, the batch, the schedules.

`args` is base_train's namespace of flags throughout.
"""

import dataclasses
import math

import torch

from nanochat.gpt import GPT, GPTConfig

REFERENCE_BATCH = 2**19  # tokens; learning rates and decay were tuned at this batch, at REFERENCE_DEPTH
REFERENCE_DEPTH = 12


def model_config(args, depth, vocab_size):
    """The GPTConfig of a `depth` that these flags ask for: width is depth * aspect ratio, in whole heads."""
    heads = max(1, -(-depth * args.aspect_ratio // args.head_dim))
    return GPTConfig(
        sequence_len=args.max_seq_len,
        vocab_size=vocab_size,
        n_layer=depth,
        n_head=heads,
        n_kv_head=heads,
        n_embd=heads * args.head_dim,
        window_pattern=args.window_pattern,
    )


def scaling_params(model):
    counts = model.num_scaling_params()
    return counts["transformer_matrices"] + counts["lm_head"]


@dataclasses.dataclass
class Plan:
    """batch_size: tokens per step over all ranks; batch_factor: on learning rates; decay: Muon's weight decay."""

    iterations: int
    batch_size: int
    accumulation: int
    batch_factor: float
    decay: float


def make_plan(args, model, world_size):
    """The Plan of a run. Raises ValueError where the batch does not divide over the ranks or no step is left."""
    with torch.device("meta"):
        reference = GPT(model_config(args, REFERENCE_DEPTH, model.config.vocab_size))
    tokens = args.target_param_data_ratio * scaling_params(model)
    reference_tokens = args.target_param_data_ratio * scaling_params(reference)
    batch_size = args.total_batch_size
    if batch_size < 0:
        batch_size = 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference_tokens) ** 0.383))
    per_pass = args.device_batch_size * args.max_seq_len * world_size
    if batch_size < per_pass or batch_size % per_pass:
        raise ValueError(
            f"A total batch of {batch_size} tokens is no multiple of the {per_pass} that one pass over the ranks takes "
            f"({args.device_batch_size} rows x {args.max_seq_len} tokens x {world_size} ranks): change "
            "--total-batch-size or --device-batch-size."
        )
    if args.num_iterations > 0:
        iterations = args.num_iterations
    elif args.target_flops > 0:
        iterations = round(args.target_flops / (model.estimate_flops() * batch_size))
    else:
        iterations = int(tokens // batch_size)
    if iterations < 1:
        raise ValueError(
            f"There is no step to take: {tokens:,.0f} tokens are less than one batch of {batch_size:,}; set "
            "--num-iterations or a smaller --total-batch-size."
        )
    batch_factor = (batch_size / REFERENCE_BATCH) ** 0.5
    decay = args.weight_decay * batch_factor * reference_tokens / tokens
    return Plan(iterations, batch_size, batch_size // per_pass, batch_factor, decay)


def lr_factor(it, iterations, args):
    """Factor on every learning rate in step `it`: linear warm-up, flat, linear warm-down to --final-lr-frac."""
    warmdown = round(args.warmdown_ratio * iterations)
    if it < args.warmup_steps:
        return (it + 1) / args.warmup_steps
    if it <= iterations - warmdown:
        return 1.0
    left = (iterations - it) / warmdown
    return left + (1 - left) * args.final_lr_frac


def muon_momentum(it, iterations, args):
    """Muon's momentum in step `it`: 0.85 to 0.97 over 400 steps, then 0.97 to 0.90 over the warm-down."""
    warmdown = round(args.warmdown_ratio * iterations)
    if it < 400:
        return 0.85 + 0.12 * it / 400
    if it < iterations - warmdown:
        return 0.97
    return 0.97 - 0.07 * (it - (iterations - warmdown)) / warmdown


def decay_factor(it, iterations):
    """Factor on Muon's weight decay in step `it`: a cosine from 1 to 0."""
    return 0.5 * (1 + math.cos(math.pi * it / iterations))


def set_schedule(optimizer, it, plan, args):
    """Put step `it`'s learning rates, momentum and decay into the optimizer's groups; returns the rates' factor."""
    factor = lr_factor(it, plan.iterations, args)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * factor
        if group["kind"] == "muon":
            group["momentum"] = muon_momentum(it, plan.iterations, args)
            group["weight_decay"] = plan.decay * decay_factor(it, plan.iterations)
    return factor
