"""Batches of tokens for training, dealt to the ranks by row group and packed by best fit.

Every row starts with BOS and is filled to T + 1 tokens with documents that fit whole, the largest first; what is left
is filled with the start of the shortest, whose rest is dropped.
"""

import torch

from nanochat.common import get_dist_info
from nanochat.dataset import open_parquet, read_texts, split_files


def _require_data_for_all(files, split, world_size):
    """Every rank can tell whether some rank would get nothing, and then all of them stop."""
    most = max(open_parquet(path).num_row_groups for path in files)
    if most < world_size:
        raise RuntimeError(
            f"{world_size} ranks share {split} files of at most {most} row groups, so ranks {most} and up would get "
            "no data: use fewer ranks, or write the files with more row groups."
        )


def _document_batches(split, resume_state_dict, batch_size):
    """Yield (texts, (pq_idx, rg_idx, epoch)) for ever: this rank's row groups, up to `batch_size` texts at a time.

    Rank r of N reads row groups r, r + N, ... of every file. A resumed run starts at this rank's next row group after
    the state's, in the same file.
    """
    _, rank, _, world_size = get_dist_info()
    files = split_files(split)
    _require_data_for_all(files, split, world_size)
    state = resume_state_dict or {}
    pq_idx, epoch = state.get("pq_idx", 0), state.get("epoch", 1)
    rg_idx = state.get("rg_idx")
    start = rank if rg_idx is None else (rg_idx // world_size + 1) * world_size + rank
    while True:
        while pq_idx < len(files):
            file = open_parquet(files[pq_idx])
            for rg_idx in range(start, file.num_row_groups, world_size):
                texts = read_texts(file, rg_idx, files[pq_idx])
                for i in range(0, len(texts), batch_size):
                    yield texts[i : i + batch_size], (pq_idx, rg_idx, epoch)
            pq_idx, start = pq_idx + 1, rank
        pq_idx, epoch = 0, epoch + 1


def _take(buffer, space):
    """Remove from `buffer` and return the largest document of at most `space` tokens, or the start of the shortest."""
    lengths = [len(document) for document in buffer]
    fitting = [length for length in lengths if length <= space]
    best = lengths.index(max(fitting) if fitting else min(lengths))
    return buffer.pop(best)[:space]


def tokenizing_distributed_data_loader_with_state_bos_bestfit(
    tokenizer,
    B,
    T,
    split,
    tokenizer_threads=4,
    tokenizer_batch_size=128,
    device="cuda",
    resume_state_dict=None,
    buffer_size=1000,
):
    """Yield (inputs, targets, state) for ever: (B, T) int64 each, on `device`, targets one token ahead of inputs.

    state: {"pq_idx", "rg_idx", "epoch"} of the last texts read, from which resume_state_dict goes on; documents that
    waited in the buffer of `buffer_size` are lost then. The tensors are views of one buffer: the next batch replaces
    them. Raises RuntimeError on every rank when any rank would get no row group, ValueError for broken files.
    """
    device = torch.device(device)
    bos = tokenizer.get_bos_token_id()
    batches = _document_batches(split, resume_state_dict, tokenizer_batch_size)
    documents, position = [], None
    rows = torch.empty((B, T + 1), dtype=torch.long)
    staged = torch.empty((2, B, T), dtype=torch.long, pin_memory=device.type == "cuda")
    on_device = torch.empty((2, B, T), dtype=torch.long, device=device)
    while True:
        for row in range(B):
            filled = 0
            while filled < T + 1:
                while len(documents) < buffer_size:
                    texts, position = next(batches)
                    documents += tokenizer.encode(texts, prepend=bos, num_threads=tokenizer_threads)
                taken = _take(documents, T + 1 - filled)
                rows[row, filled : filled + len(taken)] = torch.tensor(taken, dtype=torch.long)
                filled += len(taken)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the copy before this one still reads `staged`
        staged[0].copy_(rows[:, :-1])
        staged[1].copy_(rows[:, 1:])
        on_device.copy_(staged, non_blocking=device.type == "cuda")
        pq_idx, rg_idx, epoch = position
        yield on_device[0], on_device[1], {"pq_idx": pq_idx, "rg_idx": rg_idx, "epoch": epoch}


def tokenizing_distributed_data_loader_bos_bestfit(*args, **kwargs):
    """The same without the state: (inputs, targets)."""
    for inputs, targets, _ in tokenizing_distributed_data_loader_with_state_bos_bestfit(*args, **kwargs):
        yield inputs, targets
