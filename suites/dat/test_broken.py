"""DAT: data that something is wrong with gets a clear error on every rank, or is dealt with.

DAT-08  more ranks than row groups (should)
DAT-10  a shard that was cut short, or is no parquet file (should)
DAT-11  a shard without rows (should)
DAT-12  empty documents
DAT-13  a single shard, so that nothing is left to train on (should)
"""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_gate import requirement, verify
from suites.dat import corpus
from suites.dat.reader import spoiled
from suites.dat.test_dealing import documents, some

SHARDS = ((9, 8, 10, 7), (8, 9, 7, 8), (9, 7, 8, 9), (6, 8, 7, 5))
GOOD = {n for s in (0, 2) for group in corpus.layout(SHARDS)[s] for n in group}
ALL = GOOD | {n for group in corpus.layout(SHARDS)[1] for n in group}
COUNT = 60  # batches; well over an epoch for each of two ranks


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def garbage(path):
    path.write_text("<html>404: there is no such shard</html>\n" * 20)


def no_rows(path):
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)


def read(ranks, size, name, shards=SHARDS, **how):
    base = corpus.make(ranks, name, shards, **how)
    return ranks(spoiled, base, COUNT, size=size, fresh=True)


def is_clear(ended, words):
    return ended.startswith("raises") and any(word in ended.lower() for word in words)


def verify_told_or_dealt_with(said, what, words, wanted):
    """Every rank raises with one of the words, or goes on and together they have every document of `wanted`."""
    expected = f"{what}: an error with the word {' or '.join(words)} on every rank, or batches of all other documents"
    lost = wanted - set().union(*(documents(of_rank["x"]) | set(of_rank["log"]) for of_rank in said))
    if not lost and all(len(of_rank["x"]) and not of_rank["ended"].startswith("raises") for of_rank in said):
        return  # whether there is a second epoch is DAT-02's matter
    ended = [of_rank["ended"] for of_rank in said]
    for rank, why in enumerate(ended):
        verify(not why or is_clear(why, words), expected, f"rank {rank} {why}")
    if any(ended):
        silent = [rank for rank, why in enumerate(ended) if not why]
        verify(not silent, expected, f"rank {ended.index(next(filter(None, ended)))} raises, rank {silent} goes on")
        return
    verify(not lost, expected, f"{len(lost)} documents do not come: {some(lost)}")


@requirement("DAT-08", "More ranks than row groups: every rank says so, or all have data", level="should", sizes=(2, 3))
def test_too_few_groups(ranks, size):
    """The rank without data spins in silence while the others wait for it in their first collective."""
    shards = ((9,), (8,), (7,), (6,)) if size == 2 else ((9, 8), (8, 7), (7, 9), (6, 5, 4))
    said = read(ranks, size, f"few-{size}", shards)
    wanted = {n for shard in corpus.layout(shards)[:-1] for group in shard for n in group}
    words = ("row group", "no data", "ranks")
    verify_told_or_dealt_with(said, f"{size} ranks and {size - 1} row groups", words, wanted)


@requirement("DAT-10", "A damaged shard is named in an error, or left out", level="should", sizes=(2,))
@pytest.mark.parametrize("how", ["cut", "garbage"])
def test_damaged(ranks, size, how):
    """Downloads break off; an error that names no file leaves hundreds of shards to try."""
    said = read(ranks, size, how, spoil={"cut": cut, "garbage": garbage}[how])
    verify_told_or_dealt_with(said, f"shard_00001.parquet is {how}", ("shard_00001",), GOOD)


@requirement("DAT-11", "A shard without rows is named in an error, or passed over", level="should", sizes=(2,))
def test_no_rows(ranks, size):
    """A hang or a crash on one empty file wastes the run that meets it."""
    verify_told_or_dealt_with(
        read(ranks, size, "no-rows", spoil=no_rows), "a shard without rows", ("shard_00001",), GOOD
    )


@requirement("DAT-12", "Empty documents are passed over or become a lone BOS", sizes=(2,))
def test_empty_documents(ranks, size):
    """Real text has empty documents, and a run must not end at the first."""
    said = read(ranks, size, "empty", empty_every=5)
    verify_told_or_dealt_with(said, "every fifth document is empty", ("empty",), ALL)


@requirement("DAT-13", "A single shard: every rank says that nothing is left to train on", level="should", sizes=(2,))
def test_single(ranks, size):
    """The first shard is what one tries first, and a silent spin tells nobody that a second is missing."""
    shards = ((9, 8, 10, 7),)
    wanted = {n for group in corpus.layout(shards)[0] for n in group}
    words = ("shard", "parquet", "split", "file")
    verify_told_or_dealt_with(read(ranks, size, "single", shards), "one shard", words, wanted)
