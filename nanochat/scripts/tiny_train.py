"""Train a tiny model on the bundled corpus, on a CPU, in about half a minute and without a network.

    python -m nanochat.scripts.tiny_train
    torchrun --nproc-per-node=2 -m nanochat.scripts.tiny_train

Flags are base_train's and override the tiny ones. Everything goes to <base dir>/tiny, away from real runs; the
tokenizer is trained on first use and kept there.
"""

import os
import sys
from pathlib import Path

from filelock import FileLock

from nanochat import common
from nanochat.dataset import parquets_iter_batched
from nanochat.scripts import base_train
from nanochat.tokenizer import train_tokenizer

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
VOCABULARY = 1024
FLAGS = [
    "--device-type=cpu",
    "--depth=2",
    "--head-dim=64",
    "--max-seq-len=128",
    "--window-pattern=L",
    "--device-batch-size=4",
    "--total-batch-size=2048",
    "--num-iterations=100",
    "--warmup-steps=5",
    "--eval-every=50",
    "--eval-tokens=16384",
]


def main(argv=None):
    tiny = Path(common.get_base_dir(), "tiny")
    os.environ["NANOCHAT_BASE_DIR"] = str(tiny)
    os.environ["NANOCHAT_DATA_DIR"] = str(CORPUS)
    common.get_base_dir()
    with FileLock(tiny / "tokenizer.lock"):  # one rank trains it, the others wait
        if not (tiny / "tokenizer" / "token_bytes.pt").exists():
            print(f"Training a tokenizer of {VOCABULARY} tokens on the bundled corpus", flush=True)
            texts = (text for batch in parquets_iter_batched("train") for text in batch)
            train_tokenizer(texts, VOCABULARY, tiny / "tokenizer")
    base_train.main([*FLAGS, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    main()
