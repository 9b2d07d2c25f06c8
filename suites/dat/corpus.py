"""Corpora whose every token tells its document and its place in it, and the tokenizer that reads them.

Document k of L tokens has the text "k:L" and the tokens BOS, FIRST + k * STRIDE, FIRST + k * STRIDE + 1, ...
"""

import pyarrow as pa
import pyarrow.parquet as pq

BOS = 1
FIRST = 100
STRIDE = 64
LONG = 48  # tokens; longer than a row of the batches that are read
# Documents per row group, per shard; the last shard validates.
PLAIN = (
    (7, 12, 5, 9, 11, 6, 8, 10, 7),
    (9, 4, 8, 13, 6, 7, 5, 9, 8, 6),
    (8, 8, 10, 5, 7, 12, 6, 9),
    (6, 8, 7, 9, 5, 8),
)
DATA_FOLDERS = ("base_data", "base_data_climbmix")  # where revisions of nanochat look, under the base directory


class Tokenizer:
    """What a loader needs of a tokenizer; `log` keeps the documents it was given, in order."""

    def __init__(self):
        self.log = []

    def get_bos_token_id(self):
        return BOS

    def encode_special(self, text):
        return BOS

    def get_vocab_size(self):
        return FIRST + STRIDE * 1000

    def encode(self, text, prepend=None, append=None, num_threads=1):
        if not isinstance(text, str):
            return [self.encode(one, prepend, append) for one in text]
        tokens = []
        if text:
            number, length = map(int, text.split(":"))
            self.log.append(number)
            tokens = [FIRST + number * STRIDE + i for i in range(length)]
        before, after = ([] if extra is None else [BOS] for extra in (prepend, append))
        return [*before, *tokens, *after]

    __call__ = encode


def length(number):
    """Tokens of document `number`, without BOS: mostly short, one in eleven longer than a row."""
    return LONG if number % 11 == 10 else 3 + (number * 7) % 26


def layout(shards):
    """Per shard and row group the numbers of its documents, counted through."""
    made, number = [], 0
    for groups in shards:
        made.append([])
        for count in groups:
            made[-1].append(list(range(number, number + count)))
            number += count
    return made


def write(base, shards, empty_every=0):
    """Write a corpus where every revision looks for it; `empty_every` puts an empty text before each so-many-th one."""
    for name in DATA_FOLDERS:
        (base / name).mkdir(parents=True)
        for index, groups in enumerate(layout(shards)):
            schema = pa.schema([("text", pa.string())])
            with pq.ParquetWriter(base / name / f"shard_{index:05d}.parquet", schema) as file:
                for numbers in groups:
                    texts = []
                    for number in numbers:
                        texts += [""] if empty_every and number % empty_every == 0 else []
                        texts.append(f"{number}:{length(number)}")
                    file.write_table(pa.table({"text": texts}, schema=schema), row_group_size=len(texts))


def make(ranks, name, shards, spoil=None, **how):
    """The base directory of the corpus `name`, made once for the run. spoil(path) is called on the second shard."""

    def build():
        base = ranks.gate.folder / f"dat-{name}"
        write(base, shards, **how)
        if spoil:
            for folder in DATA_FOLDERS:
                spoil(base / folder / "shard_00001.parquet")
        return str(base)

    return ranks.gate.shared(f"dat-{name}", build)
