"""Faults of the data path, each with the ids that must catch it."""

from tests.faults.edit import Edit, Fault

LOADER = "nanochat/dataloader.py"
DATASET = "nanochat/dataset.py"
READ = "_document_batches"
PACK = "tokenizing_distributed_data_loader_with_state_bos_bestfit"

FAULTS = [
    Fault(
        "every-rank-reads-all",
        "N ranks train on the same data: N times the cost for one rank's learning.",
        Edit(LOADER, READ, "range(start, file.num_row_groups, world_size)", "range(0, file.num_row_groups)"),
        ids=("DAT-01",),
    ),
    Fault(
        "last-row-groups-dropped",
        "Row groups that do not fill a round of the ranks are never read.",
        Edit(
            LOADER,
            READ,
            "range(start, file.num_row_groups, world_size)",
            "range(start, file.num_row_groups // world_size * world_size - (world_size == 1), world_size)",
        ),
        ids=("DAT-01",),
    ),
    Fault(
        "shards-as-listed",
        "Ranks number the shards in the order of their own file system and read the same data twice.",
        Edit(DATASET, "list_parquet_files", "sorted(os.listdir(folder))", "os.listdir(folder)"),
        ids=("DAT-01",),
    ),
    Fault(
        "one-epoch-only",
        "A run longer than its data ends in the middle.",
        Edit(LOADER, READ, "pq_idx, epoch = 0, epoch + 1", "return"),
        ids=("DAT-02",),
        trains=False,
    ),
    Fault(
        "second-epoch-spins",
        "A run longer than its data hangs.",
        Edit(LOADER, READ, "pq_idx, epoch = 0, epoch + 1", "epoch += 1"),
        ids=("DAT-02",),
        trains=False,
    ),
    Fault(
        "epoch-not-counted",
        "A resumed run tells the wrong epoch.",
        Edit(LOADER, READ, "pq_idx, epoch = 0, epoch + 1", "pq_idx = 0"),
        ids=("DAT-02",),
    ),
    Fault(
        "documents-by-the-clock",
        "Which document comes next depends on the time: no run can be repeated.",
        Edit(LOADER, "_take", "buffer.pop(best)", "buffer.pop(best if __import__('time').time_ns() // 64 % 8 else 0)"),
        ids=("DAT-03",),
    ),
    Fault(
        "targets-are-inputs",
        "The model learns to repeat its input, with the best loss ever seen.",
        Edit(LOADER, PACK, "rows[:, 1:]", "rows[:, :-1]"),
        ids=("DAT-04",),
    ),
    Fault(
        "targets-rolled",
        "The last target of a row is its first token.",
        Edit(LOADER, PACK, "rows[:, 1:]", "rows[:, :-1].roll(-1, 1)"),
        ids=("DAT-04",),
    ),
    Fault(
        "rest-goes-on",
        "A row starts in the middle of a document.",
        Edit(
            LOADER,
            "_take",
            "return buffer.pop(best)[:space]",
            "taken = buffer.pop(best); buffer.extend([taken[space:]] if taken[space:] else []); return taken[:space]",
        ),
        ids=("DAT-05",),
    ),
    Fault(
        "targets-int32",
        "The loss refuses its targets.",
        Edit(LOADER, PACK, "on_device[1]", "on_device[1].int()"),
        ids=("DAT-06",),
        trains=False,
    ),
    Fault(
        "validation-trained-on",
        "The validation shard is part of the training data.",
        Edit(DATASET, "split_files", "files[:-1]", "files"),
        ids=("DAT-01",),
    ),
    Fault(
        "validation-on-training-data",
        "The validation loss is that of data learned by heart.",
        Edit(DATASET, "split_files", "files[-1:]", "files[:1]"),
        ids=("DAT-07",),
    ),
    Fault(
        "resume-at-the-start",
        "A resumed run trains the head of the data again.",
        Edit(LOADER, READ, "state = resume_state_dict or {}", "state = {}"),
        ids=("DAT-09",),
    ),
    Fault(
        "resume-at-the-same-group",
        "A resumed run repeats a row group.",
        Edit(LOADER, READ, "(rg_idx // world_size + 1)", "(rg_idx // world_size)"),
        ids=("DAT-09",),
    ),
    Fault(
        "resume-at-the-next-shard",
        "A resumed run leaves out the rest of its shard.",
        Edit(LOADER, READ, 'state.get("pq_idx", 0)', 'state.get("pq_idx", -1) + 1'),
        ids=("DAT-09",),
    ),
    Fault(
        "spins-without-data",
        "As stock: a rank without a row group computes for ever.",
        Edit(LOADER, "_require_data_for_all", "most < world_size", "False"),
        ids=("DAT-08",),
        trains=False,
    ),
    Fault(
        "damage-unnamed",
        "An error on one of hundreds of shards does not say which.",
        Edit(
            DATASET,
            "open_parquet",
            'f"{path} is no whole parquet file ({error}): delete it and download it again."',
            '"not a parquet file"',
        ),
        ids=("DAT-10",),
    ),
]
