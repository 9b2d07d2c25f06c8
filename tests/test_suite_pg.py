"""The PG suite's judgements on made-up reports of ranks, so that what needs GPUs to happen is seen red without them."""

from types import SimpleNamespace

import pytest
import torch

from nanochat_gate import Unsupported, Violation
from suites.pg import start, test_alone, test_device, test_group, test_torchrun, test_weights


def told(*reports, claims=("cpu", "cuda"), cpu_init="group"):
    """A fixture `ranks` whose calls all return these reports, one a rank."""

    def ranks(*_args, **_kwargs):
        return list(reports)

    ranks.facts = SimpleNamespace(where={}, claims=claims, cpu_init=cpu_init)
    return ranks


def started(rank, size, device, /, **other):
    backend = "gloo" if device == "cpu" else "nccl"
    made = {"raised": "", "tuple": [True, rank, rank, size, device], "size": size, "number": rank, "backend": backend}
    return made | {"total": size * (size + 1) // 2, "bound": "", "current": rank} | other


def on_gpus(**of_rank_1):
    return told(started(0, 2, "cuda:0", bound="cuda:0"), started(1, 2, "cuda:1", **of_rank_1))


def test_nccl_group_bound_or_not_is_right():
    test_group.test_nccl_group(on_gpus(), 2)
    test_group.test_nccl_group(on_gpus(bound="cuda:1"), 2)


@pytest.mark.parametrize(
    "wrong",
    [
        {"raised": "RuntimeError: no"},
        {"size": 0},
        {"size": 1},
        {"number": 0},
        {"backend": "gloo"},
        {"total": 2},
        {"current": 0},
        {"bound": "cuda:0"},
        {"tuple": [True, 1, 0, 2, "cuda:1"]},
        {"tuple": [True, 1, 1, 2, "cuda:0"]},
        {"tuple": [True, 1, 1, 2]},
    ],
    ids=str,
)
def test_nccl_group_that_is_wrong(wrong):
    """Two ranks on one GPU, or a rank whose group is not the others', must not pass for want of a GPU here."""
    with pytest.raises(Violation):
        test_group.test_nccl_group(on_gpus(**wrong), 2)


def test_group_of_one_may_be_none_only_where_it_says_so():
    """Stock reports a distributed run of one and makes no group; a plain single process is no fault."""
    none = {"size": 0, "number": 0, "backend": "", "total": 0}
    test_group.test_gloo_group(told(started(0, 1, "cpu", **none) | {"tuple": [False, 0, 0, 1, "cpu"]}), 1)
    with pytest.raises(Violation, match=r"reports world size 1 but makes no process group$"):
        test_group.test_gloo_group(told(started(0, 1, "cpu", **none)), 1)
    alone = started(0, 2, "cpu", **none) | {"tuple": [False, 0, 0, 1, "cpu"]}
    with pytest.raises(Violation, match="reports a run of one process and makes no process group"):
        test_group.test_gloo_group(told(alone, alone), 2)


def test_single_process_that_raises():
    """Refusing a CPU is a fault only of a fork that claims it; failing on a stray RANK always is one."""
    fine = {"raised": "", "tuple": test_alone.ALONE, "size": 0}
    raises = fine | {"raised": "AssertionError"}
    with pytest.raises(Violation, match=r"compute_init raises AssertionError$"):
        test_alone.test_without_torchrun(told([raises]))
    with pytest.raises(Unsupported):
        test_alone.test_without_torchrun(told([raises], claims=("cuda",)))
    with pytest.raises(Violation, match="only LOCAL_RANK set"):
        test_alone.test_part_of_the_environment(told([fine, fine, raises, fine, fine], claims=("cuda",)))


def test_unequal_weights():
    """A tensor that only one rank has, or that differs in one bit, is a difference."""
    start.verify_equal(told(), [{"a": "1", "b": "2"}] * 3)
    for other in ({"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}):
        with pytest.raises(Violation, match="rank 2 of 3 differs from rank 0 in 1: "):
            start.verify_equal(told(), [{"a": "1", "b": "2"}] * 2 + [other])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.cfloat])
def test_left_over(dtype):
    """Whatever its dtype, an element nobody wrote is found, and a tensor that was written whole is not."""
    first, second = (float("nan"), float("nan")) if dtype.is_floating_point else (-1, 0)
    pair = [torch.zeros(4, dtype=dtype).fill_(value) for value in (first, second)]
    assert test_weights.left_over(*pair) == "never written"
    for tensor in pair:
        tensor[1:] = 1
    assert test_weights.left_over(*pair) == "1 of 4 elements never written"
    for tensor in pair:
        tensor.fill_(1 if dtype == torch.bool else -1 % 256)
    assert test_weights.left_over(*pair) == ""


def test_refusals():
    """Silence is no refusal, and an assertion without words no clear one."""
    silent = {"raised": "", "tuple": [True, 0, 0, 2, "mps"], "size": 0, "backend": ""}
    refused = silent | {"raised": "ValueError: 'TPU' is unknown"}
    wordless = silent | {"raised": "AssertionError"}
    test_device.test_refused(told({"tpu": wordless}), 2)
    test_device.test_named(told({"tpu": refused}), 2)
    for test, made in ((test_device.test_refused, silent), (test_device.test_named, wordless)):
        with pytest.raises(Violation):
            test(told({"tpu": refused}, {"tpu": made}), 2)
    with pytest.raises(Violation, match="makes no process group"):
        test_device.test_mps(told({"mps": silent}), 2)


def under_torchrun(calls, **other):
    of_ranks = [{"hash": rank, "collectives": own, "bypassed": []} | other for rank, own in enumerate(calls)]
    ranks = told()
    ranks.gate = SimpleNamespace(folder=test_torchrun.Path("/nowhere"), shared=lambda *_: {"ranks": of_ranks})
    return ranks


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([["a  x:1", "b  x:2"], ["a  x:1", "c  x:3"]], "call 1: rank 0 b, rank 1 c"),
        ([["a  x:1", "b  x:2"], ["a  x:1"]], "rank 1 issues 1"),
        ([[], []], "no collective"),
    ],
)
def test_collectives_that_differ(calls, words):
    test_torchrun.test_collectives(under_torchrun([calls[0] or ["a  x:1"]] * 2), 2)
    with pytest.raises(Violation, match=words):
        test_torchrun.test_collectives(under_torchrun(calls), 2)
