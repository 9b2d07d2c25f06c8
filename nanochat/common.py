"""What every other module needs: the device, the process group, the compute dtype, printing from one rank."""

import logging
import os
import urllib.request

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------------------------------------------------------
# Compute dtype. Master weights are fp32; activations and matrix products run in COMPUTE_DTYPE.
# Read it as `common.COMPUTE_DTYPE` when you compute: compute_init() sets it anew for the device of the run.

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def cpu_has_bf16_units():
    """True where this CPU multiplies bf16 matrices in hardware (AMX-BF16 or AVX512-BF16), as far as torch can tell."""
    try:
        known = torch.cpu.get_capabilities()
        return bool(known.get("amx_bf16") or known.get("avx512_bf16"))
    except AttributeError:  # torch 2.9 has the private questions only
        questions = [getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("avx512_bf16", "amx_tile")]
        return any(ask() for ask in questions if ask is not None)


def choose_compute_dtype(device_type):
    """(dtype, reason) for a run on `device_type` ("cuda", "mps" or "cpu"); NANOCHAT_DTYPE decides where it is set."""
    wanted = os.environ.get("NANOCHAT_DTYPE")
    if wanted:
        if wanted not in DTYPES:
            raise ValueError(f"NANOCHAT_DTYPE is {wanted!r}, which is unknown: set it to one of {', '.join(DTYPES)}.")
        return DTYPES[wanted], f"NANOCHAT_DTYPE={wanted}"
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        if major >= 8:
            return torch.bfloat16, f"CUDA sm{major}{minor} has bf16"
        return torch.float32, f"CUDA sm{major}{minor} has no bf16 (float16 needs NANOCHAT_DTYPE=float16)"
    if device_type == "cpu" and cpu_has_bf16_units():
        return torch.bfloat16, "this CPU has bf16 matrix units"
    return torch.float32, f"{device_type} without fast bf16"


def autodetect_device_type():
    """The best device there is: "cuda", else "mps", else "cpu"."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


# The best guess until compute_init() knows the device.
COMPUTE_DTYPE, COMPUTE_DTYPE_REASON = choose_compute_dtype(autodetect_device_type())

# ---------------------------------------------------------------------------------------------------------------------
# The process group.


def is_ddp_requested():
    """True under torchrun: RANK, LOCAL_RANK and WORLD_SIZE are all in the environment."""
    return all(name in os.environ for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))


def is_ddp_initialized():
    """True while there is a process group."""
    return dist.is_available() and dist.is_initialized()


def get_dist_info():
    """(ddp, rank, local_rank, world_size) as the environment asks for; (False, 0, 0, 1) without torchrun."""
    if not is_ddp_requested():
        return False, 0, 0, 1
    return True, int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])


def _check_device(device_type, ddp, local_rank):
    if device_type not in ("cuda", "mps", "cpu"):
        raise ValueError(f'device_type is {device_type!r}: expected "cuda", "mps" or "cpu".')
    if device_type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError('device_type is "cuda" but torch finds no CUDA device here: ask for "cpu" instead.')
        if ddp and local_rank >= torch.cuda.device_count():
            raise RuntimeError(
                f"LOCAL_RANK {local_rank} needs a GPU of its own but torch sees {torch.cuda.device_count()}: "
                "start at most one process per GPU."
            )
    if device_type == "mps":
        if ddp:
            raise RuntimeError('device_type "mps" cannot run under torchrun: use one process, or "cpu" (Gloo).')
        if not torch.backends.mps.is_available():
            raise RuntimeError('device_type is "mps" but torch finds no MPS device here: ask for "cpu" instead.')


def _join_group(backend, rank, world_size, **options):
    """Make the default process group, or keep one of the same rank and size that is there already."""
    if is_ddp_initialized():
        have = dist.get_rank(), dist.get_world_size()
        if have != (rank, world_size):
            raise RuntimeError(
                f"There is a process group already, in which this is rank {have[0]} of {have[1]}, but the environment "
                f"says rank {rank} of {world_size}: call compute_cleanup() first."
            )
        return
    # A launcher's store outlives the group, and a second group would read the addresses of the first one from it.
    # So every group gets a prefix of its own, counted on the store itself, where all ranks see the same count.
    from torch.distributed.rendezvous import rendezvous

    store, rank, world_size = next(rendezvous("env://", rank=rank, world_size=world_size))
    generation = (store.add("nanochat/joined", 1) - 1) // world_size
    store = dist.PrefixStore(f"nanochat/{generation}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **options)


def compute_init(device_type="cuda"):
    """Start a run on `device_type`: compute dtype, seeds and, under torchrun, the process group.

    Returns (ddp: bool, rank, local_rank, world_size, device). Seeds torch with 42 on every rank, since equal initial
    weights come from equal seeds and nobody broadcasts them. Under torchrun CUDA gets NCCL and `cuda:LOCAL_RANK`, the
    CPU gets Gloo; a group of the same rank and size that exists already is kept.
    Raises ValueError for an unknown device_type, RuntimeError for a device that is not there or cannot do this.
    """
    global COMPUTE_DTYPE, COMPUTE_DTYPE_REASON
    ddp, rank, local_rank, world_size = get_dist_info()
    _check_device(device_type, ddp, local_rank)
    if not ddp and is_ddp_initialized() and dist.get_world_size() > 1:
        raise RuntimeError(
            f"There is a process group of {dist.get_world_size()} ranks, but RANK, LOCAL_RANK and WORLD_SIZE are not "
            "all set: set them as torchrun does, or call compute_cleanup() first."
        )
    device = torch.device(device_type)
    if device_type == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32
        if ddp:
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
    COMPUTE_DTYPE, COMPUTE_DTYPE_REASON = choose_compute_dtype(device_type)
    torch.manual_seed(42)  # on a GPU too
    if ddp:
        if device_type == "cuda":
            _join_group("nccl", rank, world_size, device_id=device)
        else:
            _join_group("gloo", rank, world_size)
        dist.barrier()
    return ddp, rank, local_rank, world_size, device


def require_same_on_all_ranks(facts):
    """Raise RuntimeError on every rank where `facts` (a dict of name to a JSON value) differ between ranks.

    Ranks that read other data or another tokenizer train apart without a word; on many machines each has its own copy.
    """
    if not is_ddp_initialized():
        return
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for name, value in everyone[0].items():
        others = [rank for rank, theirs in enumerate(everyone) if theirs.get(name) != value]
        if others:
            raise RuntimeError(
                f"The {name} of rank {others[0]}, {everyone[others[0]].get(name)}, differ from rank 0's, {value}: "
                "give every rank the same."
            )


def compute_cleanup():
    """Destroy the process group, if there is one. compute_init() may follow."""
    if is_ddp_initialized():
        dist.destroy_process_group()


# ---------------------------------------------------------------------------------------------------------------------
# Files and output.


def get_base_dir():
    """Where data, tokenizers and checkpoints live: NANOCHAT_BASE_DIR, or ~/.cache/nanochat. Created when missing."""
    base_dir = os.environ.get("NANOCHAT_BASE_DIR") or os.path.join(os.path.expanduser("~"), ".cache", "nanochat")
    os.makedirs(base_dir, exist_ok=True)
    return base_dir


def download_file_with_lock(url, filename, postprocess_fn=None):
    """Fetch `url` to `<base dir>/<filename>` unless it is there, and return that path.

    Many processes may ask at once: one downloads, the others wait on a file lock. `postprocess_fn(path)` runs once,
    after the download and under the lock, so nobody sees the file before it is done; where it fails, the file goes. A
    download cut short leaves no file under the final name.
    """
    from filelock import FileLock

    path = os.path.join(get_base_dir(), filename)
    with FileLock(path + ".lock"):
        if os.path.exists(path):
            return path
        partial = path + ".partial"
        with urllib.request.urlopen(url) as response, open(partial, "wb") as out:
            while block := response.read(1 << 20):
                out.write(block)
        os.replace(partial, path)
        if postprocess_fn is not None:
            try:
                postprocess_fn(path)
            except BaseException:
                os.remove(path)
                raise
    return path


def print0(s="", **kwargs):
    """print() on rank 0 only."""
    if int(os.environ.get("RANK", 0)) == 0:
        print(s, **kwargs)


def print_banner():
    """The program's name, once, on rank 0."""
    print0("\n  n a n o c h a t\n  ---------------\n")


def setup_default_logging():
    """Log from INFO up to stderr, with time, module and level."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")


class DummyWandb:
    """Stands in for a wandb run where nothing is to be logged."""

    def log(self, *args, **kwargs):
        pass

    def finish(self):
        pass


# (part of the device's name, dense bf16 FLOP/s, memory bytes/s), from the vendors' data sheets; the first hit counts.
_DEVICES = [
    ("gb200", 2.5e15, 8e12), ("b200", 2.25e15, 8e12), ("b100", 1.8e15, 8e12),
    ("gh200", 989e12, 4.9e12), ("h200", 989e12, 4.8e12), ("h100 nvl", 835e12, 3.9e12),
    ("h100 pcie", 756e12, 2e12), ("h100", 989e12, 3.35e12), ("h800", 989e12, 3.35e12),
    ("a100", 312e12, 2e12), ("a800", 312e12, 2e12), ("a40", 149.7e12, 696e9), ("a10g", 70e12, 600e9),
    ("a10", 125e12, 600e9), ("a30", 165e12, 933e9), ("l40s", 362e12, 864e9), ("l40", 181e12, 864e9),
    ("l4", 121e12, 300e9), ("rtx 5090", 209.5e12, 1.79e12), ("rtx 4090", 165.2e12, 1.01e12),
    ("rtx 3090", 71e12, 936e9), ("mi300x", 1.3074e15, 5.3e12), ("mi325x", 1.3074e15, 6e12),
]  # fmt: skip


def _look_up(device_name, column, what):
    for row in _DEVICES:
        if row[0] in device_name.lower():
            return row[column]
    logger.warning(f"The peak {what} of {device_name!r} is not known; utilisation will read 0%.")
    return float("inf")


def get_peak_flops(device_name):
    """Peak dense bf16 FLOP/s of a device by name; inf when unknown."""
    return _look_up(device_name, 1, "FLOP/s")


def get_peak_bandwidth(device_name):
    """Peak memory bandwidth in bytes/s of a device by name; inf when unknown."""
    return _look_up(device_name, 2, "bandwidth")
