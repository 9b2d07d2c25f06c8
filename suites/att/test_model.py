"""ATT: attention through the target's own model, which also judges targets without an attention module.

    ATT-18  no token changes the logits before it, every token changes those that follow
    ATT-19  sampling: a prompt in one go, its cache copied to several rows, then token by token
    ATT-20  a prompt in chunks (nanochat's own sampling feeds it in one go)
    ATT-23  what a bf16 model computes once, as rotary angles, is computed in fp32 and rounded then
    ATT-24  a cache that was reset remembers nothing

ATT-19 and ATT-20 run past the short window, and carry whatever else a cache holds between calls, as the smear.
"""

from nanochat_gate import Unsupported, requirement, verify
from suites.att import judging, models

CHANGED = (0, 1, 75, 130, 138)
NEAR = 16  # how far any model must look back; a memory that fades may lose in roundings what is farther
CHUNKS = [50, 70, 30, 1, 9]


def run(ranks, backend, function, *args):
    return judging.run(ranks, backend, "float32", function, *args)


def allowed(got):
    moved = f"weights moved by an ulp move logits by {got['moved']:.2g}, times {got['terms']} roundings"
    return f"{got['bound']:.2g} ({moved})"


def same(got, splits):
    """Every position's logits through the cache equal those of one forward."""
    __tracebackhide__ = True
    gap = got["gap"]
    off = ~(gap <= got["bound"])
    starts = [sum(splits[:i]) for i in range(len(splits))]
    actual = hint = ""
    if off.any():
        first = int(off.any(0).nonzero()[0])
        row = int(off[:, first].nonzero()[0])
        actual = (
            f"{int(off.sum())} of {off.numel()} positions differ, fed as {judging.spans(splits)}: first {first} "
            f"of row {row}, by {float(gap[row, first]):.2g}; the largest difference is {float(gap.max()):.2g}"
        )
        if any(first == left + 1 for left in got["windows"]):
            hint = (
                f"the window of {first - 1} hides its first key from position {first}: does the cached path apply it?"
            )
        elif first in starts[1:]:
            hint = f"position {first} is the first of a call: is all that the previous call left in the cache used?"
    expected = f"logits as in one forward over all tokens, within {allowed(got)}"
    verify(not off.any(), expected, actual, where=got["where"], hint=hint)


@requirement("ATT-18", "A token changes no logits before it, and does change those that follow")
def test_causal(ranks, backend):
    """A model that sees the token it is to predict has a splendid loss and is worth nothing."""
    got = run(ranks, backend, models.changed_tokens, list(CHANGED))
    where = ranks.facts.where.get("forward", "")
    for position, moves in zip(CHANGED, got["moves"], strict=True):
        leaks = [i for i in range(position) if not moves[i] <= got["bound"]]
        blind = [i for i in range(position, min(position + NEAR, len(moves))) if not moves[i] > got["bound"]]
        for wrong in (leaks, blind):
            verify(
                not wrong,
                f"the token at position {position} moves logits by more than {allowed(got)} at no position before it, "
                f"and at each of the {NEAR} from it on",
                f"it moves those at {wrong[0]} by {moves[wrong[0]]:.2g}" if wrong else "",
                where=where,
            )


@requirement("ATT-19", "Sampling with the KV cache gives the logits of a full forward")
def test_sampling(ranks, backend):
    """What is sampled comes from another model than the one that was trained and evaluated."""
    got = run(ranks, backend, models.sampled)
    same(got, [models.PROMPT] + [1] * models.TOKENS)


@requirement("ATT-20", "A prompt fed in chunks gives the logits of a full forward", level="should")
def test_chunks(ranks, backend):
    """A server that feeds long prompts in chunks answers a slightly different prompt."""
    got = run(ranks, backend, models.chunked, CHUNKS)
    same(got, CHUNKS)


@requirement("ATT-24", "A KV cache that was reset gives the logits of a full forward", level="should")
def test_reset(ranks, backend):
    """The first token of one user's text continues the text of another."""
    got = run(ranks, backend, models.reused)
    same(got, [models.TOKENS])


@requirement("ATT-23", "What a bf16 model keeps in buffers, as rotary angles, is its fp32 value rounded once")
def test_tables(ranks, backend):
    """Angles taken in bf16 are the same for several positions past 256: a long text is read out of order."""
    want = run(ranks, backend, models.tables)
    got = judging.run(ranks, backend, "bfloat16", models.tables)
    common = [n for n, t in got["tables"].items() if n in want["tables"] and t.shape == want["tables"][n].shape]
    if not common:
        raise Unsupported("the target's model has no buffers to look at")
    for name in common:
        true, rounded = want["tables"][name].double(), got["tables"][name].double()
        off = (rounded - true).abs() / true.abs().clamp_min(2.0**-126)
        worst = int(off.argmax())
        verify(
            bool((off <= 2.0**-8).all()),
            f"buffer {name} of a bf16 model within one rounding, 2^-8, of that of an fp32 model",
            f"{int((off > 2.0**-8).sum())} of {off.numel()} numbers are further off, "
            f"such as {float(rounded.flatten()[worst]):.3g} where fp32 has {float(true.flatten()[worst]):.3g}",
            where=got["where"],
            hint="take the angles, cos and sin in fp32 and cast the result",
        )
