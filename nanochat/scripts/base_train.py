"""Pretrain a GPT from scratch on the data in the base directory, on one process or many.

    python -m nanochat.scripts.base_train --depth=4
    torchrun --nproc-per-node=2 -m nanochat.scripts.base_train -- --depth=4 --device-type=cpu

The `--` keeps torchrun from taking flags of ours for abbreviations of its own. A first SIGINT or SIGTERM ends the run
after the step it is in, with a checkpoint to go on from; the exit code is then 128 plus the signal's number.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from nanochat import checkpoint_manager, common
from nanochat.common import print0
from nanochat.dataloader import (
    tokenizing_distributed_data_loader_bos_bestfit,
    tokenizing_distributed_data_loader_with_state_bos_bestfit,
)
from nanochat.dataset import data_fingerprint
from nanochat.engine import Engine
from nanochat.gpt import GPT
from nanochat.loss_eval import evaluate_bpb
from nanochat.schedule import make_plan, model_config, set_schedule
from nanochat.tokenizer import get_token_bytes, get_tokenizer

PROMPTS = ("The capital of France is", "If yesterday was Friday, then tomorrow will be", "The opposite of hot is")


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="base_train",
        description="Pretrain a GPT from scratch.",
        epilog="Under torchrun put -- before these flags: "
        "torchrun --nproc-per-node=2 -m nanochat.scripts.base_train -- --depth=4",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run", default="dummy", help='name of the wandb run; "dummy" logs nothing (default)')
    add("--device-type", default="", help="cuda, cpu or mps; default: the best there is")
    add("--depth", type=int, default=20, help="layers; sets the width too (default %(default)s)")
    add("--aspect-ratio", type=int, default=64, help="channels per layer of depth (default %(default)s)")
    add("--head-dim", type=int, default=128, help="channels per attention head (default %(default)s)")
    add("--max-seq-len", type=int, default=2048, help="context, in tokens (default %(default)s)")
    add("--window-pattern", default="SSSL", help="S short and L full windows, tiled over layers (default %(default)s)")
    add("--num-iterations", type=int, default=-1, help="optimizer steps; -1: from --target-flops or the ratio")
    add("--target-flops", type=float, default=-1.0, help="train for so many FLOPs; -1: from the ratio")
    add("--target-param-data-ratio", type=float, default=12, help="tokens per matrix parameter (default %(default)s)")
    add("--device-batch-size", type=int, default=32, help="rows per rank and micro-batch (default %(default)s)")
    add("--total-batch-size", type=int, default=-1, help="tokens per step over all ranks; -1: from the model's size")
    add("--embedding-lr", type=float, default=0.3, help="AdamW rate of embeddings (default %(default)s)")
    add("--unembedding-lr", type=float, default=0.008, help="AdamW rate of the head (default %(default)s)")
    add("--weight-decay", type=float, default=0.28, help="Muon's cautious decay (default %(default)s)")
    add("--matrix-lr", type=float, default=0.02, help="Muon rate of matrices (default %(default)s)")
    add("--scalar-lr", type=float, default=0.5, help="AdamW rate of scalars (default %(default)s)")
    add("--warmup-steps", type=int, default=40, help="steps of rising rates (default %(default)s)")
    add(
        "--warmdown-ratio", type=float, default=0.65, help="share of the steps with falling rates (default %(default)s)"
    )
    add("--final-lr-frac", type=float, default=0.05, help="last rate over the full one (default %(default)s)")
    add("--resume-from-step", type=int, default=-1, help="go on from the checkpoint of this step; -1: from scratch")
    add("--eval-every", type=int, default=250, help="steps between bpb evaluations; -1: never (default %(default)s)")
    add("--eval-tokens", type=int, default=80 * 524288, help="tokens per evaluation (default %(default)s)")
    add("--core-metric-every", type=int, default=-1, help="accepted as -1 only: the CORE metric is not part of this")
    add("--sample-every", type=int, default=2000, help="steps between samples; -1: never (default %(default)s)")
    add("--save-every", type=int, default=-1, help="steps between checkpoints; -1: at the end only (default)")
    add("--model-tag", default=None, help="name of the checkpoint folder; default: d<depth>")
    args = parser.parse_args(argv)
    for name in ("depth", "aspect_ratio", "head_dim", "max_seq_len", "device_batch_size"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}: expected at least 1")
    if args.core_metric_every > 0:
        parser.error("--core-metric-every: the CORE metric is not part of this nanochat; leave it at -1")
    return args


# ---------------------------------------------------------------------------------------------------------------------
# The run.


class StopRequest:
    """Remembers the first SIGINT or SIGTERM; a second one ends the process as it would have without us."""

    def __init__(self):
        self.signum = 0
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._note)

    def _note(self, signum, frame):
        self.signum = signum
        signal.signal(signum, signal.SIG_DFL)


def mean_over_ranks(loss, stop, device):
    """(the loss averaged over ranks, the highest signal number that any rank was sent): what all ranks agree on."""
    if not common.is_ddp_initialized():
        return loss.item(), stop.signum
    both = torch.zeros(1 + dist.get_world_size(), dtype=torch.float32, device=device)
    both[0] = loss / dist.get_world_size()
    both[1 + dist.get_rank()] = stop.signum
    dist.all_reduce(both)
    return both[0].item(), int(both[1:].max())


def agree_on_overflow(scaler, optimizer):
    """Make every rank skip a float16 step in which any rank's gradients overflowed: step() communicates."""
    if common.is_ddp_initialized():
        for found in scaler._found_inf_per_device(optimizer).values():
            dist.all_reduce(found, op=dist.ReduceOp.MAX)


def start_wandb(args, rank):
    if args.run == "dummy" or rank != 0:
        return common.DummyWandb()
    try:
        import wandb
    except ImportError:
        raise ValueError(
            f"--run={args.run} logs to wandb, which is not installed: install it or leave --run out."
        ) from None
    return wandb.init(project="nanochat", name=args.run, config=vars(args))


@contextlib.contextmanager
def one_sentence(rank):
    """Set-up errors are the user's to mend: show them as a sentence and end with code 1."""
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


def sample(model, tokenizer):
    engine = Engine(model, tokenizer)
    for prompt in PROMPTS:
        tokens = tokenizer.encode(prompt, prepend=tokenizer.get_bos_token_id())
        rows, _ = engine.generate_batch(tokens, num_samples=1, max_tokens=16, temperature=0)
        print0(tokenizer.decode(rows[0]), flush=True)


def main(argv=None):
    args = parse(argv)
    device_type = args.device_type or common.autodetect_device_type()
    rank = common.get_dist_info()[1]
    with one_sentence(rank):
        ddp, rank, _, world_size, device = common.compute_init(device_type)
    try:
        with one_sentence(rank):
            run = prepare(args, rank, world_size, device)
        stopped = train(args, run, rank, world_size, device)
    finally:
        if ddp and sys.exc_info()[0] is None:  # a failing rank ends at once: others may never come to the clean-up
            common.compute_cleanup()
    if stopped:
        sys.exit(128 + stopped)


def prepare(args, rank, world_size, device):
    """All that a run needs before its first step, in a namespace. Raises with one sentence where that cannot be."""
    run = argparse.Namespace()
    run.tokenizer = get_tokenizer()
    run.token_bytes = get_token_bytes(device=device)
    flags = {name: value for name, value in vars(args).items() if name != "run"}
    common.require_same_on_all_ranks(
        {"flags": flags, "tokenizer": run.tokenizer.fingerprint(), "data": data_fingerprint()}
    )
    config = model_config(args, args.depth, run.tokenizer.get_vocab_size())
    with torch.device("meta"):
        run.model = GPT(config)
    run.model.to_empty(device=device)
    run.model.init_weights()
    run.plan = make_plan(args, run.model, world_size)
    run.optimizer = run.model.setup_optimizer(
        unembedding_lr=args.unembedding_lr * run.plan.batch_factor,
        embedding_lr=args.embedding_lr * run.plan.batch_factor,
        matrix_lr=args.matrix_lr * run.plan.batch_factor,
        scalar_lr=args.scalar_lr * run.plan.batch_factor,
        weight_decay=run.plan.decay,
    )
    run.folder = os.path.join(common.get_base_dir(), "base_checkpoints", args.model_tag or f"d{args.depth}")
    run.step, run.smooth_loss, run.min_bpb, run.seconds, loader_state = 0, 0.0, float("inf"), 0.0, None
    if args.resume_from_step >= 0:
        weights, shard, meta = checkpoint_manager.load_checkpoint(
            run.folder, args.resume_from_step, device, load_optimizer=True, rank=rank
        )
        run.model.load_state_dict(weights, strict=True)
        run.optimizer.load_state_dict(shard)
        loop = meta["loop_state"]
        run.step, loader_state = args.resume_from_step, meta["dataloader_state_dict"]
        run.smooth_loss, run.min_bpb = loop["smooth_train_loss"], loop["min_val_bpb"]
        run.seconds = loop["total_training_time"]
    run.loader = tokenizing_distributed_data_loader_with_state_bos_bestfit(
        run.tokenizer,
        args.device_batch_size,
        args.max_seq_len,
        split="train",
        device=device,
        resume_state_dict=loader_state,
    )
    run.batch = next(run.loader)
    run.eval_steps = args.eval_tokens // (args.device_batch_size * args.max_seq_len * world_size)
    if args.eval_every > 0 and run.eval_steps < 1:
        raise ValueError(
            f"--eval-tokens={args.eval_tokens} is less than one batch over the ranks, "
            f"{args.device_batch_size * args.max_seq_len * world_size} tokens: raise it."
        )
    run.scaler = torch.amp.GradScaler(device.type) if common.COMPUTE_DTYPE is torch.float16 else None
    run.wandb = start_wandb(args, rank)
    tokens = run.plan.iterations * run.plan.batch_size
    print0(f"{device} x {world_size}, {common.COMPUTE_DTYPE} ({common.COMPUTE_DTYPE_REASON})")
    print0(f"model: {config}")
    print0(f"parameters: {run.model.num_scaling_params()}, {run.model.estimate_flops():e} FLOPs per token")
    print0(
        f"plan: {run.plan.iterations:,} steps of {run.plan.batch_size:,} tokens ({run.plan.accumulation} micro-batches "
        f"on each rank), {tokens:,} tokens in all",
        flush=True,
    )
    return run


def train(args, run, rank, world_size, device):
    """Steps 0 to N, the last of which only evaluates and saves. Returns the signal that ended it early, or 0."""
    model, optimizer, plan = run.model, run.optimizer, run.plan
    compiles = (
        device.type == "cuda" or os.environ.get("NANOCHAT_COMPILE") == "1"
    )  # a first compile takes a CPU a minute
    fast_model = torch.compile(model, dynamic=False) if compiles else model
    flops_per_token = model.estimate_flops()
    peak = common.get_peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else float("inf")
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    stop, stopped, val_bpb = StopRequest(), 0, None
    first_step = run.step

    while True:
        it, last = run.step, run.step == plan.iterations
        if args.eval_every > 0 and not stopped and (last or it % args.eval_every == 0):
            model.eval()
            batches = tokenizing_distributed_data_loader_bos_bestfit(
                run.tokenizer, args.device_batch_size, args.max_seq_len, split="val", device=device
            )
            val_bpb = evaluate_bpb(fast_model, batches, run.eval_steps, run.token_bytes)
            run.min_bpb = min(run.min_bpb, val_bpb)
            print0(f"Step {it:05d} | Validation bpb: {val_bpb:.6f}", flush=True)
            run.wandb.log({"step": it, "val/bpb": val_bpb})
            model.train()
        if args.sample_every > 0 and rank == 0 and not stopped and (last or (it > 0 and it % args.sample_every == 0)):
            model.eval()
            sample(model, run.tokenizer)
            model.train()
        due = args.save_every > 0 and it > 0 and it != args.resume_from_step and it % args.save_every == 0
        if last or stopped or due:
            meta = {
                "step": it,
                "val_bpb": val_bpb,
                "model_config": dataclasses.asdict(model.config),
                "user_config": vars(args),
                "device_batch_size": args.device_batch_size,
                "max_seq_len": args.max_seq_len,
                "total_batch_size": plan.batch_size,
                "dataloader_state_dict": run.batch[2],
                "loop_state": {
                    "min_val_bpb": run.min_bpb,
                    "smooth_train_loss": run.smooth_loss,
                    "total_training_time": run.seconds,
                },
            }
            checkpoint_manager.save_checkpoint(
                run.folder, it, model.state_dict(), optimizer.state_dict(), meta, rank=rank
            )
        if last or stopped:
            break

        synchronize()
        start = time.perf_counter()
        total = torch.zeros((), device=device)
        for _ in range(plan.accumulation):
            x_BT, y_BT, state = run.batch
            loss = fast_model(x_BT, y_BT) / plan.accumulation
            total += loss.detach()
            (run.scaler.scale(loss) if run.scaler else loss).backward()
            run.batch = next(run.loader)  # while the device works
        factor = set_schedule(optimizer, it, plan, args)
        if run.scaler:
            run.scaler.unscale_(optimizer)
            agree_on_overflow(run.scaler, optimizer)
            run.scaler.step(optimizer)
            run.scaler.update()
        else:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        loss_value, stopped = mean_over_ranks(total, stop, device)
        synchronize()
        seconds = time.perf_counter() - start

        run.seconds += seconds
        run.step += 1
        run.smooth_loss = 0.9 * run.smooth_loss + 0.1 * loss_value
        shown = run.smooth_loss / (1 - 0.9**run.step)
        rate = int(plan.batch_size / seconds)
        mfu = 100 * flops_per_token * plan.batch_size / seconds / (peak * world_size)
        left = (plan.iterations - run.step) * run.seconds / run.step
        print0(
            f"step {it:05d}/{plan.iterations:05d} ({100 * it / plan.iterations:.2f}%) | loss: {shown:.6f} | "
            f"lrm: {factor:.2f} | dt: {1000 * seconds:.2f}ms | tok/sec: {rate:,} | bf16_mfu: {mfu:.2f} | "
            f"epoch: {state['epoch']} pq: {state['pq_idx']} rg: {state['rg_idx']} | "
            f"total time: {run.seconds / 60:.2f}m | eta: {left / 60:.1f}m",
            flush=True,
        )
        run.wandb.log(
            {"step": it, "train/loss": shown, "train/lrm": factor, "train/dt": seconds, "train/tok_per_sec": rate}
        )
        if not math.isfinite(loss_value) and run.scaler is None:
            print0(f"The loss is {loss_value} in step {it}: lower the learning rates.", file=sys.stderr)
            sys.exit(1)

    if stopped:
        name = signal.Signals(stopped).name
        print0(f"Stopped by {name} after step {run.step}; go on with --resume-from-step={run.step}.", flush=True)
    else:
        evaluated = f", lowest validation bpb {run.min_bpb:.6f}" if math.isfinite(run.min_bpb) else ""
        print0(f"Done: {run.step - first_step:,} steps, {run.seconds / 60:.2f} minutes{evaluated}.", flush=True)
    run.wandb.finish()
    return stopped


if __name__ == "__main__":
    main()
