"""Faults of the process group: how a run starts and ends."""

from tests.faults.edit import Edit, Fault

COMMON = "nanochat/common.py"
GPT = "nanochat/gpt.py"
OPTIM = "nanochat/optim.py"

FAULTS = [
    Fault(
        "no-gloo-group",
        "As stock: under torchrun on CPU there is no process group, and every rank trains alone.",
        Edit(
            COMMON,
            "compute_init",
            '_join_group("gloo", rank, world_size)',
            "return ddp, rank, local_rank, world_size, device",
        ),
        ids=("PG-01", "PG-16"),
    ),
    Fault(
        "group-of-one",
        "Every rank makes a group of its own, so that collectives run and average nothing.",
        Edit(
            COMMON,
            "compute_init",
            '_join_group("gloo", rank, world_size)',
            "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)",
        ),
        ids=("PG-01", "PG-16"),
    ),
    Fault(
        "local-rank-is-rank",
        "On a second machine ranks ask for GPUs that it does not have.",
        Edit(COMMON, "get_dist_info", 'int(os.environ["LOCAL_RANK"])', 'int(os.environ["RANK"])'),
        ids=("PG-02",),
    ),
    Fault(
        "every-rank-is-rank-0",
        "Every rank takes itself for rank 0: all read the same data and write the same checkpoint.",
        Edit(
            COMMON,
            "compute_init",
            "return ddp, rank, local_rank, world_size, device",
            "return ddp, 0, local_rank, world_size, device",
        ),
        ids=("PG-02", "PG-17"),
    ),
    Fault(
        "group-without-torchrun",
        "A single process takes itself for a rank under torchrun and finds no one to meet.",
        Edit(COMMON, "get_dist_info", "return False, 0, 0, 1", "return True, 0, 0, 1"),
        ids=("PG-04",),
        trains=False,
    ),
    Fault(
        "rank-alone-counts",
        "A RANK that a scheduler left behind makes a single process fail at its start.",
        Edit(
            COMMON,
            "is_ddp_requested",
            'all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))',
            '"RANK" in os.environ',
        ),
        ids=("PG-05",),
    ),
    Fault(
        "local-rank-not-asked-for",
        "RANK and WORLD_SIZE of some other launcher are taken for torchrun's.",
        Edit(
            COMMON,
            "is_ddp_requested",
            '("RANK", "LOCAL_RANK", "WORLD_SIZE")',
            '("RANK", "WORLD_SIZE")',
        ),
        ids=("PG-05",),
    ),
    Fault(
        "cleanup-keeps-the-group",
        "compute_cleanup does nothing, so a finished run warns of leaked resources, or hangs as it ends.",
        Edit(COMMON, "compute_cleanup", "dist.destroy_process_group()", "pass"),
        ids=("PG-06", "PG-09", "PG-16"),
    ),
    Fault(
        "cleanup-assumes-a-group",
        "A script that ran in a single process ends in a traceback.",
        Edit(COMMON, "compute_cleanup", "is_ddp_initialized()", "dist.is_available()"),
        ids=("PG-07", "PG-08"),
    ),
    Fault(
        "cleanup-asks-the-environment",
        "compute_cleanup destroys a group that is not there when a run under torchrun failed before it was made.",
        Edit(COMMON, "compute_cleanup", "is_ddp_initialized()", "is_ddp_requested()"),
        ids=("PG-08",),
    ),
    Fault(
        "seed-dropped",
        "Every rank draws weights of its own: the ranks average gradients of different models.",
        Edit(COMMON, "compute_init", "torch.manual_seed(42)", "pass"),
        ids=("PG-10", "PG-18"),
    ),
    Fault(
        "seed-of-the-rank",
        "Seeds differ by rank, as they rightly do for data, and so do the initial weights.",
        Edit(COMMON, "compute_init", "torch.manual_seed(42)", "torch.manual_seed(42 + rank)"),
        ids=("PG-10", "PG-18"),
    ),
    Fault(
        "weights-in-the-order-of-a-set",
        "Value embeddings are drawn in the order of a set of names, which differs from process to process.",
        Edit(
            GPT,
            "GPT.init_weights",
            "for table in self.value_embeds.values():\n    nn.init.uniform_(table.weight, -s, s)",
            "for i in {*self.value_embeds}:\n    nn.init.uniform_(self.value_embeds[i].weight, -s, s)",
        ),
        ids=("PG-18",),
    ),
    Fault(
        "collectives-in-the-order-of-hashes",
        "Groups are reduced in an order that differs from process to process, so that collectives pair up wrongly.",
        Edit(
            OPTIM,
            "MuonAdamW.step",
            'groups = [group for group in self.param_groups if group["params"]]',
            "groups = sorted(self.param_groups, key=lambda g: hash(f\"{g['kind']} {g['lr']} {g['params'][0].shape}\"))",
        ),
        ids=("PG-19",),
        trains=False,
    ),
    Fault(
        "smear-not-initialised",
        "smear_lambda is whatever memory held before, mostly zero, sometimes not.",
        Edit(GPT, "GPT.init_weights", "self.smear_lambda.fill_(0.0)", "pass"),
        ids=("PG-11",),
        trains=False,  # or not, by what memory held
    ),
    Fault(
        "last-lambda-not-initialised",
        "One element of a parameter keeps what memory held before.",
        Edit(GPT, "GPT.init_weights", "range(n)", "range(max(n - 1, 1))"),
        ids=("PG-11",),
    ),
    Fault(
        "rotary-tables-not-initialised",
        "The buffers of the rotary embedding are only made by the constructor, on the meta device.",
        Edit(
            GPT,
            "GPT.init_weights",
            "self.cos, self.sin = self._precompute_rotary_embeddings("
            "self.rotary_seq_len, self.config.n_embd // self.config.n_head, device=self.get_device())",
            "pass",
        ),
        ids=("PG-11",),
        trains=False,
    ),
    Fault(
        "device-not-checked",
        "A rank asked for a device it cannot use trains on another, or on none in common with the other ranks.",
        Edit(COMMON, "compute_init", "_check_device(device_type, ddp, local_rank)", "pass"),
        ids=("PG-12", "PG-14"),
    ),
    Fault(
        "device-refused-without-its-name",
        "A mistyped device ends in an error that does not say which.",
        Edit(
            COMMON,
            "_check_device",
            """f'device_type is {device_type!r}: expected "cuda", "mps" or "cpu".'""",
            "'unknown device'",
        ),
        ids=("PG-13",),
    ),
    Fault(
        "mps-under-torchrun",
        "On a Mac every rank under torchrun trains alone on the one GPU.",
        Edit(
            COMMON,
            "_check_device",
            """raise RuntimeError('device_type "mps" cannot run under torchrun: use one process, or "cpu" (Gloo).')""",
            "pass",
        ),
        ids=("PG-14",),
    ),
    Fault(
        "dtype-by-machine",
        "As stock: a CPU run on a machine with a GPU computes in bfloat16.",
        Edit(
            COMMON,
            "compute_init",
            "COMPUTE_DTYPE, COMPUTE_DTYPE_REASON = choose_compute_dtype(device_type)",
            "pass",
        ),
        ids=("PG-15",),
    ),
]
