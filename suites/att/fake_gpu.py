"""A GPU presented on a machine that has none: torch.cuda reports one, and kernel packages are stubs that know what the
real ones take. Runs in ranks, and is put up only around the import of the attention module and the calls to it.

    with presented((9, 0)) as gpu:       # what torch.cuda.get_device_capability says
        q = gpu.tensor(q)                # a CPU tensor that says it is on cuda:0
        ...
    gpu.calls                            # what reached a kernel

A stub refuses what the kernel it stands for does not take, with an error that says so, and computes the rest by
attention's formula. FlashAttention-3 takes bf16 on compute capability 8.x and 9.0, and its builds for nanochat no
fp16; FlashAttention-2 takes fp16 and bf16 from 8.0 on. Neither takes CPU tensors. What a stub cannot show is what the
real kernel would make of a call that it takes.
"""

import contextlib
import importlib.machinery
import re
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from suites.att import formula

CUDA = torch.device("cuda", 0)


class Refused(RuntimeError):
    """What a real kernel would have refused, or crashed on."""


class OnGpu(torch.Tensor):
    """A CPU tensor that says it is on cuda:0, and so do its results."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func == torch.Tensor.device.__get__:
            return CUDA
        if func == torch.Tensor.is_cuda.__get__:
            return True
        if func == torch.Tensor.is_cpu.__get__:
            return False
        if func == torch.Tensor.get_device:
            return CUDA.index
        return super().__torch_function__(func, types, args, kwargs or {})


class _Factories(TorchFunctionMode):
    """torch.ones(..., device="cuda") and .to("cuda") give OnGpu tensors."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.cuda:
            return args[0].as_subclass(OnGpu)
        moved = _is_cuda(kwargs.get("device")) or (func == torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]))
        if not moved:
            return func(*args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        if len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs).as_subclass(OnGpu)


def _is_cuda(device):
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def plain(tensor):
    """The CPU tensor underneath."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(torch.Tensor)


class Gpu:
    def __init__(self, capability):
        self.capability = tuple(capability)
        self.calls = []

    def tensor(self, tensor):
        return tensor.as_subclass(OnGpu)

    def built_for(self, generation):
        """Whether kernels of this generation of FlashAttention run on this hardware."""
        major = self.capability[0]
        return major in (8, 9) if generation == 3 else major >= 8

    def reached(self, kernel, generation, function, *tensors):
        """Note a call; refuse it where the real kernel would."""
        q = tensors[0]
        call = {"kernel": kernel, "function": function, "device": q.device.type, "dtype": str(q.dtype)[6:]}
        self.calls.append(call)
        takes = (torch.bfloat16,) if generation == 3 else (torch.bfloat16, torch.float16)
        if not all(t.is_cuda for t in tensors):
            raise Refused(f"{kernel} takes CUDA tensors, got {call['dtype']} on {call['device']}")
        if not self.built_for(generation):
            raise Refused(f"{kernel} has no code for compute capability {self.capability[0]}.{self.capability[1]}")
        if not all(t.dtype in takes for t in tensors):
            raise Refused(f"{kernel} takes {' and '.join(str(t)[6:] for t in takes)}, got {call['dtype']}")


class Kernel:
    """The functions of a FlashAttention kernel."""

    def __init__(self, gpu, name, generation):
        self._gpu, self._name, self._generation = gpu, name, generation
        self.flash_attn_interface = self

    def __getattr__(self, name):
        if name.startswith("flash_attn"):
            raise AttributeError(f"the stub of {self._name} has no {name}")
        raise AttributeError(name)

    def flash_attn_func(self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), **_):
        self._gpu.reached(self._name, self._generation, "flash_attn_func", q, k, v)
        mask = formula.sees(q.size(1), k.size(1), causal, window_size)
        scaled = plain(q).double() * (softmax_scale * q.size(3) ** 0.5 if softmax_scale is not None else 1.0)
        return self._gpu.tensor(formula.attend(scaled, plain(k), plain(v), mask).to(q.dtype))

    def flash_attn_with_kvcache(
        self, q, k_cache, v_cache, k=None, v=None, *, cache_seqlens=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), **_,
    ):  # fmt: skip
        self._gpu.reached(self._name, self._generation, "flash_attn_with_kvcache", q, k_cache, v_cache)
        scaled = plain(q).double() * (softmax_scale * q.size(3) ** 0.5 if softmax_scale is not None else 1.0)
        B, capacity = k_cache.shape[:2]
        starts = [capacity] * B if cache_seqlens is None else torch.as_tensor(cache_seqlens).expand(B).tolist()
        out = []
        for b, start in enumerate(starts):
            end = start
            if k is not None:
                end = start + k.size(1)
                plain(k_cache)[b, start:end] = plain(k)[b]
                plain(v_cache)[b, start:end] = plain(v)[b]
            mask = formula.sees(q.size(1), end, causal, window_size)
            row = slice(b, b + 1)
            out.append(formula.attend(scaled[row], plain(k_cache)[row, :end], plain(v_cache)[row, :end], mask))
        return self._gpu.tensor(torch.cat(out).to(q.dtype))


def _module(name, **members):
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(members)
    return module


def _stubs(gpu):
    """The packages nanochat and its forks take kernels from."""

    def generation(name):
        return 3 if re.search(r"(attn|attention)[-_]?3", name) else 2

    def get_kernel(name, *_, **__):
        return Kernel(gpu, name, generation(name))

    def has_kernel(name, *_, **__):
        return gpu.built_for(generation(name))

    modules = {"kernels": _module("kernels", get_kernel=get_kernel, has_kernel=has_kernel)}
    for name, number in (("flash_attn_interface", 3), ("flash_attn", 2)):
        kernel = Kernel(gpu, name, number)
        modules[name] = _module(
            name,
            flash_attn_func=kernel.flash_attn_func,
            flash_attn_with_kvcache=kernel.flash_attn_with_kvcache,
            flash_attn_interface=kernel,
            __version__=f"{number}.0.0",
            __path__=[],
        )
    modules["flash_attn.flash_attn_interface"] = modules["flash_attn"]
    return modules


@contextlib.contextmanager
def presented(capability):
    """Present a GPU of this compute capability; yields a Gpu."""
    gpu = Gpu(capability)
    major, minor = gpu.capability
    properties = SimpleNamespace(
        name="NVIDIA presented", major=major, minor=minor, total_memory=80 << 30, multi_processor_count=132
    )
    reports = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: gpu.capability,
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: major >= 8,
        "synchronize": lambda device=None: None,
    }
    stubs = _stubs(gpu)
    real = {name: getattr(torch.cuda, name) for name in reports}
    shadowed = {name: sys.modules[name] for name in stubs if name in sys.modules}
    for name, report in reports.items():
        setattr(torch.cuda, name, report)
    sys.modules.update(stubs)
    try:
        with _Factories():
            yield gpu
    finally:
        for name, function in real.items():
            setattr(torch.cuda, name, function)
        for name in stubs:
            sys.modules.pop(name, None)
        sys.modules.update(shadowed)
