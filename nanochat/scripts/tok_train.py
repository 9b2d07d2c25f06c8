"""Train the tokenizer on the training split and write it to <base dir>/tokenizer.

python -m nanochat.scripts.tok_train --vocab-size=32768
"""

import argparse
import os
import time

from nanochat.common import get_base_dir
from nanochat.dataset import parquets_iter_batched
from nanochat.scripts.base_train import one_sentence
from nanochat.tokenizer import train_tokenizer


def texts(max_chars, doc_cap):
    """Documents of the training split, each cut to `doc_cap` characters, until `max_chars` have been given out."""
    given = 0
    for batch in parquets_iter_batched("train"):
        for text in batch:
            yield text[:doc_cap]
            given += min(len(text), doc_cap)
            if given >= max_chars:
                return


def main(argv=None):
    parser = argparse.ArgumentParser(prog="tok_train", description="Train the tokenizer.", allow_abbrev=False)
    add = parser.add_argument
    add("--max-chars", type=int, default=2_000_000_000, help="characters to train on (default %(default)s)")
    add("--doc-cap", type=int, default=10_000, help="characters of a document that count (default %(default)s)")
    add("--vocab-size", type=int, default=32768, help="tokens, special ones included (default %(default)s)")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    folder = os.path.join(get_base_dir(), "tokenizer")
    with one_sentence(0):
        print(f"Training {args.vocab_size:,} tokens on up to {args.max_chars:,} characters", flush=True)
        tokenizer = train_tokenizer(texts(args.max_chars, args.doc_cap), args.vocab_size, folder)
    seconds = time.perf_counter() - start
    print(f"{tokenizer.get_vocab_size():,} tokens in {seconds:.1f} s, in {folder}", flush=True)


if __name__ == "__main__":
    main()
