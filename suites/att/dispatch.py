"""What ranks do to see where attention goes while a GPU is presented (see fake_gpu). Needs a fresh process each time:
what a target makes of the GPU it decides at import, for good."""

import inspect
import os
import traceback

import torch

from nanochat_gate import Blocked, NotTested, Unsupported
from suites.att import calls, fake_gpu, formula, models

B, T, CAPACITY, Hq, Hkv = 2, 9, 12, 4, 2
FULL, WINDOW = [-1, 0], [4, 0]
SWITCH = "NANOCHAT_FORCE_SDPA"


def dispatched(rank, capability, tensors, window):
    """What each attention function does with causal attention over tensors on [device, dtype], for each of `tensors`.

    A GPU of `capability` is reported from before the target is imported. dtype "run" is the one the target itself
    computes in. Each answer: function, device, dtype, error and where it came from, the kernel reached, out.
    """
    answers = []
    with fake_gpu.presented(capability) as gpu:
        try:
            functions = _imported(calls.offered, rank)
        except Unsupported:
            if any(device != "cpu" for device, _ in tensors):
                raise
            return _through_model(rank, gpu)
        for device, dtype in tensors:
            dtype = str(run_dtype(rank) or torch.bfloat16)[6:] if dtype == "run" else dtype
            for function, call in (("flash_attn_func", _plain), ("flash_attn_with_kvcache", _cached)):
                if not hasattr(functions, function):
                    continue
                place = gpu.tensor if device == "cuda" else torch.Tensor.clone
                answer = {"function": function, "device": device, "dtype": dtype, "out": None}
                answers.append(answer | _answer(rank, gpu, call, functions, place, getattr(torch, dtype), window))
    return answers


def run_dtype(rank):
    """The dtype the target says it computes in; None where it leaves that to autocast."""
    return getattr(rank.target.module("common"), "COMPUTE_DTYPE", None)


def fp32_run(rank, capability, tensors, window):
    """`dispatched` in a run that was asked to compute in fp32."""
    with fake_gpu.presented(capability):
        computes = _imported(run_dtype, rank)
    if computes != torch.float32:
        instead = "leaves the dtype to autocast" if computes is None else f"computes in {computes} all the same"
        raise Unsupported(f"no run in fp32 can be asked for by NANOCHAT_DTYPE: the target {instead}")
    return dispatched(rank, capability, tensors, window)


def _imported(importing, *args):
    """A target that can't be imported next to a presented GPU may well be next to a real one."""
    try:
        return importing(*args)
    except Blocked as blocked:
        raise NotTested(f"with a GPU presented where there is none, {blocked.reason}") from blocked


def _plain(functions, place, dtype, window):
    q, k, v = (place(t.to(dtype)) for t in formula.inputs("mild", B, T, T, Hq, Hkv))
    return calls.only(functions.flash_attn_func(q, k, v, causal=True, window_size=tuple(window)))


def _cached(functions, place, dtype, window):
    """A prompt of all but one token, then that one."""
    q, k, v = (t.to(dtype) for t in formula.inputs("mild", B, T, T, Hq, Hkv))
    caches = [place(torch.full((B, CAPACITY, Hkv, k.size(3)), calls.SENTINEL, dtype=dtype)) for _ in "kv"]
    out = []
    for at in (slice(0, T - 1), slice(T - 1, T)):
        now = place(torch.full((B,), at.start, dtype=torch.int32))
        new = dict(k=place(k[:, at]), v=place(v[:, at]), cache_seqlens=now)
        new |= dict(causal=True, window_size=tuple(window))
        out.append(calls.only(functions.flash_attn_with_kvcache(place(q[:, at]), *caches, **new)))
    return torch.cat(out, dim=1)


def _answer(rank, gpu, call, *args):
    """What came of a call."""
    before = len(gpu.calls)
    answer = {"error": "", "where": ""}
    try:
        answer["out"] = fake_gpu.plain(call(*args)).detach()
    except Exception as error:
        answer["error"] = calls.words(error)
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(rank.target.prefix)]
        if frames:
            answer["where"] = f"{os.path.relpath(frames[-1].filename, rank.target.root)}:{frames[-1].lineno}"
    answer["kernel"] = gpu.calls[-1]["kernel"] if len(gpu.calls) > before else ""
    return answer


def _through_model(rank, gpu):
    """The same of a forward through the model, on the CPU in fp32."""
    _imported(rank.target.module, "gpt")

    def forward():
        return models.logits(rank, models.randomised(rank), models.tokens(rank, 1, T))

    answer = {"function": "the model's forward", "device": "cpu", "dtype": "float32", "out": None}
    return [answer | _answer(rank, gpu, forward)]


def reads_switch(rank):
    """Whether the target's attention module so much as names the switch."""
    try:
        module = rank.target.module("flash_attention")
    except Unsupported:
        module = rank.target.module("gpt")
    return SWITCH in inspect.getsource(module)
