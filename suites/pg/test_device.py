"""PG: the device a run asks for.

PG-12  one that cannot be used under torchrun is refused
PG-13  by a message that names it (should)
PG-14  MPS is refused under torchrun where there is one, too (should)
PG-15  the compute dtype follows the device in use, not what the machine has (should)
"""

import contextlib
from types import SimpleNamespace

import torch
import torch.distributed as dist

from nanochat_gate import Unsupported, requirement, verify
from suites.pg.start import RAISES, start


def refusals(rank, devices, mps=False):
    """What compute_init does for each device. mps: an MPS device is presented."""
    if not rank.target.init_takes_device:
        raise Unsupported("compute_init takes no device")
    if mps:
        torch.backends.mps.is_available = lambda: True
    made = {}
    for device in devices:
        rank.rendezvous()
        made[device] = start(rank, device)
        if dist.is_initialized():
            dist.destroy_process_group()
    return made


def not_usable():
    """Devices that no rank can train on here: one nobody knows, and those this machine lacks."""
    lacking = {"mps": not torch.backends.mps.is_available(), "cuda": not torch.cuda.is_available()}
    return ["tpu", *(device for device, lacks in lacking.items() if lacks)]


def accepted(device, made):
    made_group = f"makes a {made['backend']} group of {made['size']}" if made["size"] else "makes no process group"
    return f'compute_init("{device}") under torchrun returns ({", ".join(map(str, made["tuple"]))}) and {made_group}'


@requirement("PG-12", "compute_init under torchrun refuses a device that cannot be used", sizes=(2,))
def test_refused(ranks, size):
    """A device that is taken silently leaves every rank training alone, on something else than was asked for."""
    for of_rank in ranks(refusals, not_usable(), size=size, group=None, fresh=True):
        for device, made in of_rank.items():
            where = ranks.facts.where.get("compute_init", "")
            verify(bool(made["raised"]), f'compute_init("{device}") raises', accepted(device, made), where=where)


@requirement("PG-13", "The refusal of a device names the device", level="should", sizes=(2,))
def test_named(ranks, size):
    """An assertion without words sends whoever mistyped a device into the source."""
    for of_rank in ranks(refusals, not_usable(), size=size, group=None, fresh=True):
        for device, made in of_rank.items():
            verify(
                device in made["raised"].lower(),
                f'compute_init("{device}") raises with a message that names {device!r}',
                f'for "{device}" {RAISES} {made["raised"]}' if made["raised"] else accepted(device, made),
                where=ranks.facts.where.get("compute_init", ""),
            )


@requirement("PG-14", "compute_init under torchrun refuses MPS where there is MPS", level="should", sizes=(2,))
def test_mps(ranks, size):
    """On a Mac the device is found by itself, torch has no collectives for it, and every rank trains alone."""
    for of_rank in ranks(refusals, ["mps"], True, size=size, group=None, fresh=True):
        made = of_rank["mps"]
        where = ranks.facts.where.get("compute_init", "")
        verify(bool(made["raised"]), 'compute_init("mps") raises', accepted("mps", made), where=where)


@contextlib.contextmanager
def gpu_presented(name, major):
    """torch reports one GPU of that compute capability; there is none, so nothing may run on it."""
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": (major, 0),
        "get_device_name": name,
        "get_device_properties": SimpleNamespace(name=name, major=major, minor=0, total_memory=80 << 30),
        "is_bf16_supported": major >= 8,
    }
    kept = {name: getattr(torch.cuda, name) for name in answers}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(torch.cuda, name, function)


def cpu_run(rank, *presented):
    """Dtypes of what a model computes on CPU, by module. presented: the GPU reported as `common` was imported."""
    assert not rank.target.modules()
    with gpu_presented(*presented) if presented else contextlib.nullcontext():
        rank.target.module("common")
    if not rank.target.init_takes_device:
        raise Unsupported("compute_init takes no device")
    made = start(rank, "cpu")
    if made["raised"]:
        raise Unsupported(f"on CPU {RAISES} {made['raised']}")
    model = rank.target.model("cpu")
    computed = {}

    def note(name):
        def hook(_module, _inputs, output):
            if isinstance(output, torch.Tensor):
                computed[name] = str(output.dtype).removeprefix("torch.")

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(note(name))
    with torch.no_grad():
        rank.target.logits(model, torch.arange(8).reshape(1, 8))
    return computed


@requirement("PG-15", "The compute dtype follows the device in use", level="should")
def test_dtype(ranks):
    """A CPU run on a machine with a GPU computes in bfloat16, many times slower on most CPUs and less exact."""
    # CPUs differ: some compute in bfloat16 by themselves, so only one of the two GPUs can show a difference.
    plain = ranks(cpu_run, size=1, group=None, torchrun=False, fresh=True)[0]
    for gpu in (("NVIDIA H100", 9), ("Tesla V100", 7)):
        beside_gpu = ranks(cpu_run, *gpu, size=1, group=None, torchrun=False, fresh=True)[0]
        names = [name for name, dtype in plain.items() if beside_gpu.get(name) != dtype]
        of = names[0] if names else ""
        verify(
            not names,
            f'after compute_init("cpu") a model computes in {plain.get(of, "one dtype")}, with a GPU reported or not',
            f"a CPU run computes in {beside_gpu.get(of)} once torch reports a {gpu[0]} ({len(names)} of {len(plain)} "
            f"modules, {of} first)",
            where=ranks.facts.where.get("compute_init", ""),
            hint="decided at import, by torch.cuda.is_available()",
        )
