"""Evaluate a pretrained checkpoint: bits per byte on both splits, and samples.

python -m nanochat.scripts.base_eval --model-tag=d4
torchrun --nproc-per-node=2 -m nanochat.scripts.base_eval -- --model-tag=d4
"""

import argparse

from nanochat import common
from nanochat.checkpoint_manager import load_model
from nanochat.common import print0
from nanochat.dataloader import tokenizing_distributed_data_loader_bos_bestfit
from nanochat.loss_eval import evaluate_bpb
from nanochat.scripts.base_train import one_sentence, sample
from nanochat.tokenizer import get_token_bytes


def parse(argv):
    parser = argparse.ArgumentParser(
        prog="base_eval", description="Bits per byte and samples of a pretrained checkpoint.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--device-type", default="", help="cuda, cpu or mps; default: the best there is")
    add("--model-tag", default=None, help="checkpoint folder under base_checkpoints; default: the largest model")
    add("--step", type=int, default=None, help="step of the checkpoint; default: the last")
    add("--device-batch-size", type=int, default=32, help="rows per rank and batch (default %(default)s)")
    add("--split-tokens", type=int, default=40 * 524288, help="tokens to evaluate per split (default %(default)s)")
    return parser.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    rank = common.get_dist_info()[1]
    with one_sentence(rank):
        _, rank, _, world_size, device = common.compute_init(args.device_type or common.autodetect_device_type())
        model, tokenizer, meta = load_model("base", device, phase="eval", model_tag=args.model_tag, step=args.step)
        token_bytes = get_token_bytes(device=device)
        length = meta["model_config"]["sequence_len"]
        steps = args.split_tokens // (args.device_batch_size * length * world_size)
        if steps < 1:
            raise ValueError(
                f"--split-tokens={args.split_tokens} is less than one batch over the ranks, "
                f"{args.device_batch_size * length * world_size} tokens: raise it or lower --device-batch-size."
            )
    size = f"{args.device_batch_size} x {length} tokens on each of {world_size} ranks"
    print0(f"step {meta['step']}, {steps} batches of {size}")
    for split in ("train", "val"):
        batches = tokenizing_distributed_data_loader_bos_bestfit(
            tokenizer, args.device_batch_size, length, split=split, device=device
        )
        print0(f"{split} bpb: {evaluate_bpb(model, batches, steps, token_bytes):.6f}", flush=True)
    if rank == 0:
        sample(model, tokenizer)
    common.compute_cleanup()


if __name__ == "__main__":
    main()
