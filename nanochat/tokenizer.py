"""The tokenizer: byte-pair merges trained with rustbpe, run with tiktoken."""

import functools
import hashlib
import os
import pickle

import rustbpe
import tiktoken
import torch

from nanochat.common import get_base_dir

SPECIAL_TOKENS = [
    f"<|{name}|>"
    for name in (
        "bos",
        "user_start",
        "user_end",
        "assistant_start",
        "assistant_end",
        "python_start",
        "python_end",
        "output_start",
        "output_end",
    )
]
# GPT-4's pattern, but numbers are cut after two digits: a small vocabulary has better uses for its tokens.
SPLIT_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
BYTES = 256


class RustBPETokenizer:
    """enc: a tiktoken Encoding whose special tokens come after the merges; each text starts with `bos_token`."""

    def __init__(self, enc, bos_token):
        self.enc = enc
        self.bos_token_id = self.encode_special(bos_token)

    @classmethod
    def train_from_iterator(cls, text_iterator, vocab_size):
        """Train on an iterator of strings; vocab_size counts the special tokens too, and is at least 265."""
        merges = vocab_size - len(SPECIAL_TOKENS)
        if merges < BYTES:
            raise ValueError(
                f"A vocabulary of {vocab_size} is too small: {BYTES} bytes and {len(SPECIAL_TOKENS)} special tokens "
                f"need {BYTES + len(SPECIAL_TOKENS)}."
            )
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(text_iterator, merges, pattern=SPLIT_PATTERN)
        ranks = {bytes(token): rank for token, rank in trainer.get_mergeable_ranks()}
        special = {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
        enc = tiktoken.Encoding(
            name="rustbpe", pat_str=trainer.get_pattern(), mergeable_ranks=ranks, special_tokens=special
        )
        return cls(enc, "<|bos|>")

    @classmethod
    def from_directory(cls, tokenizer_dir):
        """The tokenizer that save() left in a folder. FileNotFoundError says how to make one."""
        path = os.path.join(tokenizer_dir, "tokenizer.pkl")
        if not os.path.exists(path):
            raise FileNotFoundError(f"There is no tokenizer at {path}: run python -m nanochat.scripts.tok_train first.")
        with open(path, "rb") as file:
            return cls(pickle.load(file), "<|bos|>")

    def save(self, tokenizer_dir):
        """Write tokenizer.pkl, under a temporary name first, so that no reader meets half of it."""
        os.makedirs(tokenizer_dir, exist_ok=True)
        path = os.path.join(tokenizer_dir, "tokenizer.pkl")
        with open(path + ".partial", "wb") as file:
            pickle.dump(self.enc, file)
        os.replace(path + ".partial", path)

    def get_vocab_size(self):
        return self.enc.n_vocab

    def get_special_tokens(self):
        return self.enc.special_tokens_set

    def get_bos_token_id(self):
        return self.bos_token_id

    def id_to_token(self, id):
        """A token's text; bytes that are no text by themselves show as replacement characters."""
        return self.enc.decode([id])

    def decode_single_token_bytes(self, id):
        return self.enc.decode_single_token_bytes(id)

    @functools.cache  # noqa: B019 - there are nine names, and a tokenizer lives as long as its process
    def encode_special(self, text):
        """The id of a special token by name, e.g. "<|bos|>"; KeyError for another text."""
        return self.enc.encode_single_token(text)

    def encode(self, text, prepend=None, append=None, num_threads=8):
        """Token ids of a text, or a list of them for a list of texts. Names of special tokens inside are plain text.

        prepend, append: an id, or a special token's name, to put before and after each text.
        """
        first, last = self._ids(prepend), self._ids(append)
        if isinstance(text, str):
            return [*first, *self.enc.encode_ordinary(text), *last]
        if not isinstance(text, list):
            raise TypeError(f"encode takes a text or a list of texts, not {type(text).__name__}.")
        return [[*first, *ids, *last] for ids in self.enc.encode_ordinary_batch(text, num_threads=num_threads)]

    __call__ = encode

    def _ids(self, token):
        if token is None:
            return []
        return [token if isinstance(token, int) else self.encode_special(token)]

    def decode(self, ids):
        return self.enc.decode(ids)

    def token_bytes(self):
        """(vocab_size,) int32: how many bytes of text each token stands for, 0 for special tokens."""
        special = set(self.enc._special_tokens.values())
        count = [0 if i in special else len(self.decode_single_token_bytes(i)) for i in range(self.get_vocab_size())]
        return torch.tensor(count, dtype=torch.int32)

    def fingerprint(self):
        """Equal for tokenizers that cut texts into the same tokens."""
        tokens = [self.decode_single_token_bytes(i) for i in range(self.get_vocab_size())]
        return hashlib.sha256(repr((self.enc._pat_str, tokens)).encode()).hexdigest()[:16]


def train_tokenizer(text_iterator, vocab_size, tokenizer_dir):
    """Train a tokenizer and write all that other modules read of it: tokenizer.pkl, then token_bytes.pt."""
    tokenizer = RustBPETokenizer.train_from_iterator(text_iterator, vocab_size)
    tokenizer.save(tokenizer_dir)
    path = os.path.join(tokenizer_dir, "token_bytes.pt")
    torch.save(tokenizer.token_bytes(), path + ".partial")
    os.replace(path + ".partial", path)
    return tokenizer


def get_tokenizer():
    """The tokenizer of the base directory."""
    return RustBPETokenizer.from_directory(os.path.join(get_base_dir(), "tokenizer"))


def get_token_bytes(device="cpu"):
    """(vocab_size,) int32 on `device`: raw bytes per token id of the base directory's tokenizer, 0 for special ones."""
    path = os.path.join(get_base_dir(), "tokenizer", "token_bytes.pt")
    if not os.path.exists(path):
        raise FileNotFoundError(f"There is no file {path}: run python -m nanochat.scripts.tok_train first.")
    return torch.load(path, map_location=device, weights_only=True)
