"""Pretraining data: parquet files with a `text` column, the last of which is the validation split.

python -m nanochat.dataset -n 8        # download 8 training shards and the validation shard
"""

import argparse
import hashlib
import os
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq

from nanochat.common import get_base_dir

URL = "https://huggingface.co/datasets/karpathy/climbmix-400b-shuffle/resolve/main"
LAST_SHARD = 6542  # the validation shard
TRIES = 5


def default_data_dir():
    """Where the shards are: NANOCHAT_DATA_DIR, else base_data_climbmix in the base directory, else base_data there."""
    if given := os.environ.get("NANOCHAT_DATA_DIR"):
        return given
    current, legacy = (os.path.join(get_base_dir(), name) for name in ("base_data_climbmix", "base_data"))
    return legacy if os.path.isdir(legacy) and not os.path.isdir(current) else current


def list_parquet_files(data_dir=None, warn_on_legacy=False):
    """Paths of all shards, sorted by name. FileNotFoundError where there are none."""
    folder = data_dir or default_data_dir()
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    files = [os.path.join(folder, name) for name in names if name.endswith(".parquet")]
    if not files:
        raise FileNotFoundError(
            f"There is no parquet file in {folder}: download some with python -m nanochat.dataset -n 8, or name a "
            "folder in NANOCHAT_DATA_DIR."
        )
    if warn_on_legacy and data_dir is None and os.path.basename(folder) == "base_data":
        print(f"Reading the older data set in {folder}; the newer one goes to base_data_climbmix.", flush=True)
    return files


def split_files(split):
    """Paths of a split's shards: "val" is the last one, "train" all the others."""
    if split not in ("train", "val"):
        raise ValueError(f'split is {split!r}: expected "train" or "val".')
    files = list_parquet_files()
    if len(files) < 2:
        raise ValueError(f"{files[0]} is the only parquet file: the last one validates, so training needs a second.")
    return files[-1:] if split == "val" else files[:-1]


def open_parquet(path):
    """A ParquetFile; ValueError names a file that is none or was cut short."""
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise ValueError(f"{path} is no whole parquet file ({error}): delete it and download it again.") from None


def read_texts(file, row_group, path):
    """The `text` column of a row group, a list of strings."""
    try:
        return file.read_row_group(row_group, columns=["text"]).column("text").to_pylist()
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"Row group {row_group} of {path} cannot be read ({error}): delete the file and download it again."
        ) from None


def parquets_iter_batched(split, start=0, step=1):
    """Yield the texts of row groups start, start + step, ... of every shard of a split, a list a row group."""
    for path in split_files(split):
        file = open_parquet(path)
        for row_group in range(start, file.num_row_groups, step):
            yield read_texts(file, row_group, path)


def data_fingerprint():
    """Equal for folders of the same shards, judged by their names and footers: a footer has sizes and statistics."""
    digest = hashlib.sha256()
    for path in list_parquet_files():
        with open(path, "rb") as file:
            file.seek(max(0, os.path.getsize(path) - 8))
            length = int.from_bytes(file.read(4), "little")
            file.seek(max(0, os.path.getsize(path) - 8 - length))
            digest.update(os.path.basename(path).encode() + str(os.path.getsize(path)).encode() + file.read())
    return digest.hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Download.


def download_shard(index):
    """Fetch one shard unless it is there; True when it is there afterwards."""
    name = f"shard_{index:05d}.parquet"
    path = os.path.join(default_data_dir(), name)
    if os.path.exists(path):
        return True
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(f"{URL}/{name}", timeout=30) as response, open(path + ".partial", "wb") as out:
                while block := response.read(1 << 20):
                    out.write(block)
            os.replace(path + ".partial", path)
            print(f"{name} is here", flush=True)
            return True
        except OSError as error:
            print(f"{name}, try {attempt} of {TRIES}: {error}", flush=True)
            if attempt < TRIES:
                time.sleep(2**attempt)
    return False


def main(argv=None):
    parser = argparse.ArgumentParser(prog="nanochat.dataset", description="Download shards of the pretraining data.")
    parser.add_argument("-n", "--num-files", type=int, default=-1, help="training shards; -1: all (default)")
    parser.add_argument("-w", "--num-workers", type=int, default=4, help="downloads at a time (default %(default)s)")
    args = parser.parse_args(argv)
    count = LAST_SHARD if args.num_files < 0 else min(args.num_files, LAST_SHARD)
    os.makedirs(default_data_dir(), exist_ok=True)
    print(f"{count} training shards and the validation shard, to {default_data_dir()}", flush=True)
    with ThreadPoolExecutor(args.num_workers) as pool:
        done = list(pool.map(download_shard, [*range(count), LAST_SHARD]))
    if not all(done):
        raise SystemExit(f"{done.count(False)} of {len(done)} shards are missing: run the same command again.")


if __name__ == "__main__":
    main()
