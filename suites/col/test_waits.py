"""COL: the target waits for what it uses, and leaves alone what is in flight. Results withheld until the wait.

COL-10  no result is used before it is waited for
COL-11  every asynchronous collective is waited for by the end of the step
COL-12  what a collective reads or writes is left alone until the wait
COL-13  every rank issues the same collectives in the same order
COL-14  a step sends no more than ZeRO does (should)
COL-18  no tensor is handed over in a layout that the backend gets wrong

All read one run of `watched` for each number of ranks.
"""

import itertools
from fractions import Fraction

import pytest

from nanochat_gate import Unsupported, Violation, requirement, verify
from nanochat_gate.judge import first_mismatch, group_of
from nanochat_gate.observe import signature
from suites.col.test_backend import outcomes
from suites.col.watch import STEPS, watched

SIZES = (2, 3, 4)
# What a collective sends per rank, as a multiple of (N-1)/N of the bytes named.
SENT = {
    "all_reduce": ("bytes_written", 2),
    "reduce_scatter": ("bytes_read", 1),
    "reduce_scatter_single": ("bytes_read", 1),
    "all_to_all": ("bytes_read", 1),
    "all_to_all_single": ("bytes_read", 1),
}


def observed(ranks, size, backend):
    """What `watched` saw on each rank. Unsupported where it could not see all, or there was nothing to see."""

    def run():
        try:
            return {"reports": ranks(watched, STEPS, size=size, backend=backend, lane="withheld")}
        except Violation as error:
            return {"violation": vars(error)}

    got = ranks.gate.shared(f"col-watched-{backend}-{size}", run)
    if "violation" in got:
        raise Violation(**got["violation"])
    for rank, report in enumerate(got["reports"]):
        if report["bypassed"]:
            count, first = len(report["bypassed"]), report["bypassed"][0]
            raise Unsupported(
                f"unobserved: rank {rank} of {size} makes {count} calls past torch.distributed's functions, {first}"
            )
        if not any(report["steps"]):
            raise Unsupported(f"an optimizer step on {size} ranks issues no collective")
    return got["reports"]


def located(reports):
    """(rank, step, event) of every collective."""
    for rank, report in enumerate(reports):
        for step, events in enumerate(report["steps"]):
            for event in events:
                yield rank, step, event


@pytest.mark.core
@requirement("COL-10", "No result of a collective is used before it is waited for", sizes=SIZES)
def test_results(ranks, size, backend):
    """On a quiet machine the result is there in time; on a busy one the step takes in whatever memory held before."""
    for rank, report in enumerate(observed(ranks, size, backend)):
        verify(
            not report["differs"],
            "the same parameters, bit for bit, whether results arrive at once or only at the wait",
            f"rank {rank} of {size}, {report['differs']}",
            where=report["blamed"],
            hint="the result of the collective launched here is used without a wait for it" if report["blamed"] else "",
        )


@pytest.mark.core
@requirement("COL-11", "Every asynchronous collective is waited for by the end of the step", sizes=SIZES)
def test_waited(ranks, size, backend):
    """What nobody waits for may still be writing when the next step, an evaluation or a checkpoint reads."""
    for rank, step, event in located(observed(ranks, size, backend)):
        verify(
            event["waited"],
            "a wait for every asynchronous collective of a step",
            f"rank {rank} of {size}, step {step}: nobody waits for call {event['seq']}, {signature(event)}",
            where=event["where"],
        )


@requirement("COL-12", "What a collective reads and writes is left alone from launch to wait", sizes=SIZES)
def test_left_alone(ranks, size, backend):
    """An input that changes in flight reaches some ranks before and some after the change: they part for good."""
    for rank, step, event in located(observed(ranks, size, backend)):
        verify(
            not event["touched"],
            "inputs and outputs of a collective in flight stay as they are until the wait",
            f"rank {rank} of {size}, step {step}, call {event['seq']}, {signature(event)}: {event['touched']}",
            where=event["where"],
        )


@requirement("COL-13", "Every rank issues the same collectives in the same order with the same shapes", sizes=SIZES)
def test_order(ranks, size, backend):
    """Collectives that pair up wrongly hang, or add up gradients of different parameters without a word."""
    reports = observed(ranks, size, backend)
    verify_order(traces([itertools.chain(report["setup"], *report["steps"]) for report in reports]))


def traces(events):
    """The lines that judge.first_mismatch compares, for the events of each rank."""
    return [[f"{signature(event)}  {event['where']}" for event in own] for own in events]


def verify_order(traces):
    """The traces of all ranks agree, in each group among its members."""
    if (mismatch := first_mismatch(traces)) is not None:
        expected, actual, where = mismatch
        verify(False, expected, actual, where=where)
    for group in sorted({group_of(call) for calls in traces for call in calls}):
        members = [int(rank) for rank in group.split(",")] if group else list(range(len(traces)))
        own = [[call for call in traces[rank] if group_of(call) == group] for rank in members]
        most = max(own, key=len)
        for rank, calls in zip(members, own, strict=True):
            left_out = most[min(len(calls), len(most) - 1)]
            verify(
                len(calls) == len(most),
                f"{len(most)} collectives on every rank" + (f" of {group}" if group else ""),
                f"rank {rank} issues {len(calls)}; the first it leaves out: {left_out}",
                where=left_out.rpartition("  ")[2],
            )


@requirement("COL-14", "A step sends no more per rank than ZeRO's 2*S*(N-1)/N", level="should", sizes=SIZES)
def test_bytes(ranks, size, backend):
    """What is sent twice is time that more ranks do not win back."""
    for rank, report in enumerate(observed(ranks, size, backend)):
        bound = Fraction(*report["bytes"])
        for step, events in enumerate(report["steps"]):
            sent = sum(sends(event, size) for event in events)
            verify(
                sent <= bound,
                f"at most {float(bound):,.0f} bytes sent per rank and step: 2*S*(N-1)/N with N={size} and S="
                f"{float(bound * size / (2 * size - 2)):,.0f} the bytes of all parameters, padded to be dealt",
                f"rank {rank}, step {step}: {float(sent):,.0f} bytes, {float(sent / bound):.2f} times as many",
                where=max(events, key=lambda event: sends(event, size), default={"where": ""})["where"],
            )


def sends(event, size):
    """Bytes a rank sends for a collective in the leanest way; one element alone (a flag, a norm) is not counted."""
    members = len(event["group"].split(",")) if event["group"] else size
    named, times = SENT.get(event["op"], ("bytes_written", 1))
    elements = sum(_numel(shape) for shape in event["reads"] or event["writes"])
    return Fraction(times * event[named] * (members - 1), members) if elements > 1 else 0


def _numel(shape):
    count = 1
    for length in shape:
        count *= length
    return count


@requirement("COL-18", "No collective is handed a tensor in a layout that the backend gets wrong", sizes=SIZES)
def test_layouts(ranks, size, backend):
    """Gloo takes some views for dense memory: gradients get each other's elements, and neighbours are overwritten."""
    said = outcomes(ranks, size, backend)[0]
    for rank, step, event in located(observed(ranks, size, backend)):
        for layout in event["layouts"]:
            outcome = said.get(f"{event['op']}, {layout}", "right")
            verify(
                outcome == "right",
                "contiguous tensors, or such as the backend handles",
                f"rank {rank} of {size}, step {step}, call {event['seq']}, {signature(event)}: {layout}, "
                f"which {backend} gets wrong: {outcome}",
                where=event["where"],
                hint="hand over .contiguous()",
            )
