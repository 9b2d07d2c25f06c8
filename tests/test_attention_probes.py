"""What the attention suite judges with: it must accept what is right, and reject what is a little wrong."""

import importlib

import pytest
import torch

from suites.att import fake_gpu, formula, judging

SHAPES = [(7, 7, 4, 2, (-1, 0)), (9, 9, 2, 2, (3, 0)), (3, 10, 4, 1, (2, 0))]


@pytest.mark.parametrize("shape", SHAPES)
def test_formula_is_attention(shape):
    Tq, Tk, Hq, Hkv, window = shape
    q, k, v = formula.inputs("values", 2, Tq, Tk, Hq, Hkv)
    mask = formula.sees(Tq, Tk, True, window)
    heads = (t.double().transpose(1, 2) for t in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    assert torch.allclose(formula.attend(q, k, v, mask), want, rtol=0, atol=1e-14)
    assert torch.equal(formula.right(q, k, v, mask)[0], formula.attend(q, k, v, mask))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_autograds(shape):
    Tq, Tk, Hq, Hkv, window = shape
    q, k, v = (t.double().requires_grad_() for t in formula.inputs("values", 2, Tq, Tk, Hq, Hkv))
    mask = formula.sees(Tq, Tk, True, window)
    out_grad = formula.inputs("values", 2, Tq, Tk, Hq, Hkv)[0].flip(1)
    want = torch.autograd.grad(formula.attend(q, k, v, mask), (q, k, v), out_grad.double())
    with torch.no_grad():
        found, bounds = formula.gradients(q, k, v, mask, out_grad)
    for got, expected, bound in zip(found, want, bounds, strict=True):
        assert torch.allclose(got, expected, rtol=0, atol=1e-13)
        assert bound.shape == expected.shape
        assert float(bound.max()) < 1e-3 * float(expected.abs().max())


def test_queries_stand_at_the_end_of_the_keys():
    assert formula.sees(2, 4, True, (1, -1)).tolist() == [[False, True, True, False], [False, False, True, True]]
    assert formula.sees(2, 3, False, (0, 1)).tolist() == [[False, True, True], [False, False, True]]
    assert formula.sees(3, 1, True, (-1, 0)).any(-1).tolist() == [False, False, True]


def test_queries_without_a_key_give_zeros():
    q, k, v = formula.inputs("values", 1, 3, 1, 2, 2)
    out = formula.attend(q, k, v, formula.sees(3, 1, True, (-1, 0)))
    assert out[:, :2].abs().max() == 0
    assert out[:, 2].abs().max() > 0


def probed(mask, dtype="float32", Hq=4, Hkv=2):
    Tq, Tk = mask.shape
    q, k, v = formula.inputs("keys", 1, Tq, Tk, Hq, Hkv)
    return formula.attend(q, k, v, mask).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_are_read_off(dtype):
    mask = formula.sees(9, 9, True, (3, 0))
    assert judging.keys_seen(probed(mask, dtype), mask, 2, dtype) == ""
    for wrong, said in (((4, 0), "query 4, head 0 sees keys 0-4 instead of keys 1-4"), ((2, 0), "sees keys 1-3 inst")):
        text = judging.keys_seen(probed(formula.sees(9, 9, True, wrong), dtype), mask, 2, dtype)
        assert said in text


def test_a_future_key_a_wrong_head_a_wrong_share_and_a_nan_are_named():
    mask = formula.sees(9, 9, True, (-1, 0))
    assert "instead of keys 0" in judging.keys_seen(probed(formula.sees(9, 9, False, (-1, -1))), mask, 2, "float32")
    swapped = probed(mask).flip(2)
    assert "where k/v head 0 holds 1" in judging.keys_seen(swapped, mask, 2, "float32")
    assert "at key 0 where" in judging.keys_seen(probed(mask) * (1 + 2**-20), mask, 2, "float32")
    broken = probed(mask)
    broken[0, 3, 1, 0] = float("nan")
    assert "query 3, head 1 gives nan" in judging.keys_seen(broken, mask, 2, "float32")
    shining = probed(mask)
    shining[0, 3, 1, -1] = 512.0
    assert "gives 512 that no key holds" in judging.keys_seen(shining, mask, 2, "float32")


@pytest.mark.parametrize("rounded", [False, True])
def test_bounds_hold_for_arithmetic_in_that_precision_and_not_much_more(rounded):
    dtype = torch.bfloat16 if rounded else torch.float32
    q, k, v = formula.inputs("mild" if rounded else "values", 1, 100, 100, 2, 2)
    mask = formula.sees(100, 100, True, (-1, 0))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), k.to(dtype)) / 4
    weights = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, v.to(dtype))
    want, bound = formula.right(q, k, v, mask, rounded)
    assert judging.within(out, want, bound) == ""
    assert "is off" not in judging.within(want + bound * 0.99, want, bound)
    assert judging.within(want + bound * 2, want, bound)
    assert judging.within(want * float("nan"), want, bound)
    assert float(bound.max()) < (0.04 if rounded else 4e-5)  # of values up to 1


def test_a_presented_gpu_is_gone_afterwards():
    before = {name: value for name, value in vars(torch.cuda).items() if not name.startswith("__")}
    with fake_gpu.presented((9, 0)) as gpu:
        assert torch.cuda.is_available()
        assert torch.ones(2, device="cuda").is_cuda
        q = gpu.tensor(torch.ones(1, 4, 2, 8, dtype=torch.bfloat16))
        assert (q.is_cuda, q.device.type, (q * 2).transpose(1, 2).device.type) == (True, "cuda", "cuda")
        kernel = importlib.import_module("kernels").get_kernel("somebody/flash-attention-3")
        assert kernel.flash_attn_func(q, q, q, causal=True).is_cuda
        with pytest.raises(fake_gpu.Refused, match="takes CUDA tensors, got bfloat16 on cpu"):
            kernel.flash_attn_func(fake_gpu.plain(q), fake_gpu.plain(q), fake_gpu.plain(q))
        with pytest.raises(fake_gpu.Refused, match="takes bfloat16, got float32"):
            kernel.flash_attn_func(q.float(), q.float(), q.float())
    with fake_gpu.presented((10, 0)) as gpu:
        kernel = importlib.import_module("flash_attn_interface")
        with pytest.raises(fake_gpu.Refused, match=r"no code for .* 10\.0"):
            kernel.flash_attn_func(gpu.tensor(q), q, q)
    with pytest.raises(ImportError):
        importlib.import_module("flash_attn_interface")
    assert {name: value for name, value in vars(torch.cuda).items() if name in before} == before


def test_a_stub_with_a_cache_computes_the_formula():
    q, k, v = formula.inputs("values", 2, 3, 8, 4, 2)
    with fake_gpu.presented((9, 0)) as gpu:
        kernel = importlib.import_module("flash_attn_interface")
        caches = [gpu.tensor(torch.full_like(t, 512.0).bfloat16()) for t in (k, v)]
        at = torch.tensor([5, 2], dtype=torch.int32)
        for row, start in enumerate((5, 2)):
            for cache, t in zip(caches, (k, v), strict=True):
                fake_gpu.plain(cache)[row, :start] = t[row, :start].bfloat16()
        new = (torch.stack([t[0, 5:8], t[1, 2:5]]).bfloat16() for t in (k, v))
        out = kernel.flash_attn_with_kvcache(
            gpu.tensor(q.bfloat16()), *caches, *map(gpu.tensor, new), cache_seqlens=at, causal=True, window_size=(4, 0)
        )
    for row, end in enumerate((8, 5)):
        mask = formula.sees(3, end, True, (4, 0))
        want = formula.attend(*(t[row : row + 1] for t in (q, k[:, :end], v[:, :end])), mask)
        assert torch.equal(fake_gpu.plain(out)[row : row + 1], want.bfloat16())
