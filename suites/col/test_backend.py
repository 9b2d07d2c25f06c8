"""COL: what every nanochat relies on of torch's collectives. Judges torch on this machine, never the target.

COL-01  sums, averages and maxima are exact for exact inputs
COL-02  so is 64 MB
COL-03  a tensor that is not contiguous is refused or handled right, or kept out by COL-18
COL-04  all_gather from a slice of its own output
COL-05  several in flight, waited for out of order

Rank functions return what is wrong, as sentences.
"""

import warnings

import torch
import torch.distributed as dist

from nanochat_gate import exact, requirement, verify

DTYPES = ("float32", "bfloat16", "float16", "int64")
REDUCTIONS = ("SUM", "AVG", "MAX")
LENGTHS = (0, 1, 7, 1000)
LARGE = 2**24  # elements of 4 bytes


def single(name):
    """The collective over one tensor under the name this torch has for it: "reduce_scatter" or "all_gather"."""
    old = {"reduce_scatter": "reduce_scatter_tensor", "all_gather": "all_gather_into_tensor"}[name]
    return getattr(dist, f"{name}_single", None) or getattr(dist, old)


def values(rank, size, length, dtype, *key):
    """What a rank brings: multiples of `size` whose sum over 4 ranks, at most 4*4*7, is exact in bf16 and averages."""
    return (exact.integers((length,), 7, *key, rank) * size).to(getattr(torch, dtype))


def reduced(size, length, dtype, reduction, *key):
    """What the reduction of all ranks' `values` is, in the dtype of the result."""
    stack = torch.stack([values(rank, size, length, "int64", *key) for rank in range(size)])
    total = {"SUM": stack.sum(0), "AVG": stack.sum(0) // size, "MAX": stack.amax(0)}[reduction]
    return total.to(getattr(torch, dtype))


def close(got, want, size, reduction, backend):
    """Equal; or, where NCCL averages by multiplying with 1/size, as near as that can be.

    1/size is off by u = eps/2 of its value, each product by another u, each of the size-1 sums by one more, of terms
    that add up to at most 7*size: (size+1) * u * 7*size in all, u of the dtype. Exact when size is a power of two.
    """
    rounds = backend == "nccl" and reduction == "AVG" and size & (size - 1)
    if not rounds or not got.is_floating_point():
        return torch.equal(got, want)
    bound = (size + 1) * torch.finfo(got.dtype).eps / 2 * 7 * size
    return bool(((got.double() - want.double()).abs() <= bound).all())


def reductions(rank):
    wrong, size, device = [], rank.size, rank.device
    warnings.simplefilter("error", FutureWarning)  # of names that torch gives up
    for dtype in DTYPES:
        for length in LENGTHS:
            for reduction in REDUCTIONS:
                op, kind = getattr(dist.ReduceOp, reduction), f"{reduction} of {length} {dtype}"
                key = ("reduce", dtype, length, reduction)
                parts = [values(rank.rank, size, length, dtype, *key, r).to(device) for r in range(size)]
                out = [torch.full_like(parts[0], -1) for _ in range(2)]
                whole = parts[0].clone()
                try:
                    dist.all_reduce(whole, op=op)
                    dist.reduce_scatter(out[0], parts, op=op)
                    single("reduce_scatter")(out[1], torch.cat(parts), op=op)
                except RuntimeError as error:
                    if (dtype, reduction) != ("int64", "AVG"):  # an average that need not be a whole number
                        wrong.append(f"{kind}: {error}")
                    continue
                for name, got, part in (
                    ("all_reduce", whole, 0),
                    ("reduce_scatter of a list", out[0], rank.rank),
                    ("reduce_scatter", out[1], rank.rank),
                ):
                    want = reduced(size, length, dtype, reduction, *key, part)
                    if not close(got.cpu(), want, size, reduction, rank.backend):
                        wrong.append(f"{name}, {kind}: {got.tolist()[:4]} instead of {want.tolist()[:4]}")
            wrong += gathers(rank, length, dtype)
    return wrong


def gathers(rank, length, dtype):
    size, key = rank.size, ("gather", dtype, length)
    mine = values(rank.rank, size, length, dtype, *key).to(rank.device)
    whole, parts = mine.new_full((length * size,), -1), [torch.full_like(mine, -1) for _ in range(size)]
    single("all_gather")(whole, mine)
    dist.all_gather(parts, mine)
    want = torch.cat([values(r, size, length, dtype, *key) for r in range(size)])
    return [
        f"{name} of {length} {dtype}: {got.tolist()[:4]} instead of {want.tolist()[:4]}"
        for name, got in (("all_gather", whole.cpu()), ("all_gather of a list", torch.cat(parts).cpu()))
        if not torch.equal(got, want)
    ]


def large(rank):
    """64 MB reduced, scattered and gathered again, as a step does with an embedding."""
    length = LARGE // rank.size * rank.size

    def filled(times):
        return torch.arange(length, dtype=torch.float32, device=rank.device).remainder_(1021).mul_(times)

    whole = filled(rank.rank + 1)
    mine = whole.new_empty(length // rank.size)
    single("reduce_scatter")(mine, whole)
    single("all_gather")(whole.fill_(-1), mine)
    wrong = int(torch.count_nonzero(whole != filled(sum(range(1, rank.size + 1)))))
    return [f"{wrong} of {length} elements are wrong"] if wrong else []


def gaps(t):
    """The same values in memory that holds a -1 after each."""
    return torch.stack([t, torch.full_like(t, -1)], dim=-1)[..., 0]


def transposed(t):
    """The same values, column by column in memory."""
    return t.t().contiguous().t()


def strided(rank):
    """case -> "right", "refused" or what is wrong, for tensors that are not contiguous, going in and coming out."""
    said, size = {}, rank.size
    rows = torch.arange(1.0, 9.0, device=rank.device).view(2, 4)
    mine, total = rows * (rank.rank + 1), rows * (size * (size + 1) // 2)
    tall, every = mine.repeat(size, 1), torch.cat([rows * (r + 1) for r in range(size)])
    for lay in (gaps, transposed):
        for name, call, going_in, out, want in (
            ("all_reduce", lambda i, o: dist.all_reduce(o[0]), [], [mine], total),
            ("broadcast", lambda i, o: dist.broadcast(o[0], size - 1), [], [mine], rows * size),
            ("reduce_scatter_single", lambda i, o: single("reduce_scatter")(o[0], i[0]), [tall], [mine], total),
            ("reduce_scatter", lambda i, o: dist.reduce_scatter(o[0], i), [mine] * size, [mine], total),
            ("all_gather_single", lambda i, o: single("all_gather")(o[0], i[0]), [mine], [tall], every),
            ("all_gather", lambda i, o: dist.all_gather(o, i[0]), [mine], [mine] * size, every),
        ):
            for side in ("in", "out") if going_in else ("in place",):
                laid = [lay(t) if side == "in" else t.clone() for t in going_in]
                results = [t.clone() if side == "in" else lay(t) for t in out]
                case = f"{name}, {lay.__name__} {side}"
                try:
                    call(laid, results)
                except (RuntimeError, ValueError):
                    said[case] = "refused"
                    continue
                got = torch.cat(results)
                between = [t._base[..., 1] for t in (*laid, *results) if lay is gaps and not t.is_contiguous()]
                spilt = "writes to the memory between" if any((t != -1).any() for t in between) else ""
                wrong = f"{count} of {got.numel()} elements wrong" if (count := int((got != want).sum())) else ""
                said[case] = " and ".join(part for part in (wrong, spilt) if part) or "right"
    return said


def in_place(rank):
    wrong = []
    for dtype in DTYPES:
        mine = slice(5 * rank.rank, 5 * rank.rank + 5)
        want = torch.cat([values(r, rank.size, 5, dtype, "own") for r in range(rank.size)])
        whole = torch.full_like(want, -1).to(rank.device)
        whole[mine] = want[mine].to(rank.device)
        single("all_gather")(whole, whole[mine], async_op=True).wait()
        parts = [torch.full_like(want[:5], -1).to(rank.device) for _ in range(rank.size)]
        parts[rank.rank] = want[mine].to(rank.device, copy=True)
        dist.all_gather(parts, parts[rank.rank], async_op=True).wait()
        for name, got in (("", whole), (" of a list", torch.cat(parts))):
            if not torch.equal(got.cpu(), want):
                wrong.append(f"all_gather{name}, {dtype}: {got.tolist()} instead of {want.tolist()}")
    return wrong


def out_of_order(rank):
    """Three kinds of collectives in flight, four of each in turn, waited for last to first and from the middle out."""
    wrong, size = [], rank.size
    for order in (range(11, -1, -1), sorted(range(12), key=lambda i: abs(i - 6))):
        started = []
        for number in range(4):
            key = ("flight", number)
            mine = [values(rank.rank, size, 64, "float32", *key, r).to(rank.device) for r in range(size)]
            sums = [reduced(size, 64, "float32", "SUM", *key, r) for r in range(size)]
            every = torch.cat([values(r, size, 64, "float32", *key, 0) for r in range(size)])
            whole, part, gathered = (
                mine[0].clone(),
                torch.empty_like(mine[0]),
                torch.empty_like(every, device=rank.device),
            )
            started += [
                (dist.all_reduce(whole, async_op=True), whole, sums[0], mine),
                (single("reduce_scatter")(part, given := torch.cat(mine), async_op=True), part, sums[rank.rank], given),
                (single("all_gather")(gathered, mine[0], async_op=True), gathered, every, mine),
            ]
        for place in order:
            work, got, want, _ = started[place]
            work.wait()
            if not torch.equal(got.cpu(), want):
                wrong.append(f"number {place} in flight: {got.tolist()[:4]} instead of {want.tolist()[:4]}")
    return wrong


def check(found, expected):
    for rank, wrong in enumerate(found):
        verify(not wrong, expected, f"rank {rank} of {len(found)}: {len(wrong)} wrong, first {wrong and wrong[0]}")


@requirement(
    "COL-01", "Sums, averages and maxima over ranks are exact for exact inputs", subject="backend", sizes=(3, 4)
)
def test_exact(ranks, size, backend):
    """Where the backend adds up wrongly no target can train right, and none is to blame."""
    found = ranks(reductions, size=size, backend=backend, group="provided", fresh=True)
    check(found, "all_reduce, reduce_scatter and all_gather of 0 to 1000 exact values, exact")


@requirement("COL-02", "64 MB are reduced, scattered and gathered right", subject="backend", sizes=(3,))
def test_large(ranks, size, backend):
    """An embedding of a real vocabulary is this large; what goes wrong only in pieces goes wrong here."""
    check(ranks(large, size=size, backend=backend, group="provided"), "every element right")


# What Gloo of torch 2.13 gets wrong without a word (pytorch issue 192920 has more): COL-18 keeps targets from it.
KNOWN_WRONG = {
    "all_reduce, gaps in place",
    "broadcast, gaps in place",
    "reduce_scatter, gaps out",
    "reduce_scatter, transposed in",
    "reduce_scatter, transposed out",
}


@requirement(
    "COL-03",
    "A non-contiguous tensor is refused or handled right, save in the ways that COL-18 forbids",
    subject="backend",
    sizes=(3,),
)
def test_strided(ranks, size, backend):
    """A backend that takes a view for dense memory adds up, and overwrites, what lies between."""
    for rank, said in enumerate(outcomes(ranks, size, backend)):
        for case, outcome in said.items():
            verify(
                outcome in ("right", "refused") or case in KNOWN_WRONG,
                "right, or refused with an error",
                f"rank {rank} of {size}: {case}: {outcome}",
            )


def outcomes(ranks, size, backend):
    """What `strided` said on each rank."""
    name = f"col-strided-{backend}-{size}"
    return ranks.gate.shared(name, lambda: ranks(strided, size=size, backend=backend, group="provided"))


@requirement("COL-04", "all_gather takes its input from a slice of its output", subject="backend", sizes=(3, 4))
def test_in_place(ranks, size, backend):
    """Every sharded parameter is gathered this way: the slice a rank updated into the whole it lies in."""
    check(ranks(in_place, size=size, backend=backend, group="provided"), "the slices of all ranks in order")


@requirement("COL-05", "Collectives in flight may be waited for in any order", subject="backend", sizes=(3,))
def test_out_of_order(ranks, size, backend):
    """A step has dozens in flight, and a fork is free to wait for whichever it needs first."""
    check(ranks(out_of_order, size=size, backend=backend, group="provided"), "each result right after its own wait")
