"""Faults of how a run is started, ended and fed: flags, ports, signals, exceptions, what ranks must have in common."""

from tests.faults.edit import Edit, Fault

COMMON = "nanochat/common.py"
TOKENIZER = "nanochat/tokenizer.py"
DATASET = "nanochat/dataset.py"
TRAIN = "nanochat/scripts/base_train.py"

FAULTS = [
    # Two runs side by side.
    Fault(
        "port-fixed",
        "All runs on a machine meet on one port: the second one ends at its start, or joins the first.",
        Edit(
            COMMON,
            "_join_group",
            'store, rank, world_size = next(rendezvous("env://", rank=rank, world_size=world_size))',
            'store = dist.TCPStore("127.0.0.1", 29517, world_size, rank == 0)',
        ),
        ids=("LCH-01",),
        trains=False,  # with another run beside it
    ),
    Fault(
        "model-tag-ignored",
        "Runs of the same depth write their checkpoints over one another's.",
        Edit(TRAIN, "prepare", 'args.model_tag or f"d{args.depth}"', 'f"d{args.depth}"'),
        ids=("LCH-01",),
    ),
    Fault(
        "stops-a-step-early",
        "A run asked for N steps makes N - 1.",
        Edit(TRAIN, "train", "run.step == plan.iterations", "run.step == plan.iterations - 1"),
        ids=("LCH-01",),
    ),
    # A run that ends early.
    Fault(
        "exception-swallowed",
        "A run in which a rank failed ends with code 0, and the next job of a script starts without a model.",
        Edit(
            TRAIN,
            "main",
            "stopped = train(args, run, rank, world_size, device)",
            "try:\n    stopped = train(args, run, rank, world_size, device)\n"
            "except Exception as error:\n    stopped = print(error)",
        ),
        ids=("LCH-03",),
    ),
    Fault(
        "traceback-lost",
        "A rank that fails takes the reason with it.",
        Edit(
            TRAIN,
            "main",
            "stopped = train(args, run, rank, world_size, device)",
            "try:\n    stopped = train(args, run, rank, world_size, device)\nexcept Exception:\n    os._exit(1)",
        ),
        ids=("LCH-03",),
    ),
    Fault(
        "signal-forgotten",
        "A cancelled run trains on until it is killed, in the middle of whatever it does then.",
        Edit(TRAIN, "StopRequest._note", "self.signum = signum", "pass"),
        ids=("LCH-04",),
    ),
    Fault(
        "stopped-without-the-optimizer",
        "What a cancelled run saves last can't be gone on from.",
        Edit(TRAIN, "train", "optimizer.state_dict()", "None if stopped else optimizer.state_dict()"),
        ids=("LCH-04",),
    ),
    # Ranks with files of their own.
    Fault(
        "tokenizers-told-apart-by-size",
        "Ranks train with tokenizers that cut text differently.",
        Edit(
            TOKENIZER,
            "RustBPETokenizer.fingerprint",
            "hashlib.sha256(repr((self.enc._pat_str, tokens)).encode()).hexdigest()[:16]",
            "str(len(tokens))",
        ),
        ids=("LCH-05",),
    ),
    Fault(
        "data-told-apart-by-the-last-shard",
        "A rank that lacks a shard deals itself other rows than the others leave to it.",
        Edit(DATASET, "data_fingerprint", "list_parquet_files()", "list_parquet_files()[-1:]"),
        ids=("LCH-05",),
    ),
    Fault(
        "differences-refused-on-no-rank",
        "What differs between ranks is found by nobody.",
        Edit(COMMON, "require_same_on_all_ranks", "theirs.get(name) != value", "theirs.get(name) is None"),
        ids=("LCH-05",),
    ),
    # A file that several ranks want.
    Fault(
        "download-looked-for-outside-the-lock",
        "As stock: a rank takes a bundle for unpacked that another one is still unpacking.",
        Edit(
            COMMON,
            "download_file_with_lock",
            "path = os.path.join(get_base_dir(), filename)",
            "path = os.path.join(get_base_dir(), filename)\nif os.path.exists(path):\n    return path",
        ),
        ids=("LCH-06",),
        sizes=(3,),
    ),
    Fault(
        "download-without-a-lock",
        "Ranks that ask at once write over one another's file, and each unpacks it.",
        Edit(COMMON, "download_file_with_lock", 'FileLock(path + ".lock")', "open(os.devnull)"),
        ids=("LCH-06",),
        sizes=(3,),
    ),
    Fault(
        "download-not-post-processed",
        "The bundle is there and nobody unpacks it.",
        Edit(COMMON, "download_file_with_lock", "postprocess_fn is not None", "postprocess_fn is None"),
        ids=("LCH-06",),
        sizes=(3,),
    ),
]
