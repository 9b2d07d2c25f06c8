"""What the replies of a world's ranks amount to: their values, or the one exception that explains them."""

from __future__ import annotations

import itertools
from typing import Any

from nanochat_gate.requirement import Blocked, NotTested, Unsupported, Violation
from nanochat_gate.world import Reply, World


def judge(world: World, replies: list[Reply], repro: list[str]) -> list[Any]:
    """The values of all ranks, or the exception that says what the first failing rank met."""
    if all(reply.ok for reply in replies):
        return [reply.value for reply in replies]
    first = world.first if world.first is not None else next(i for i, r in enumerate(replies) if not r.ok)
    error = replies[first].error or {}
    fields = error.get("fields", {})
    raise_unjudged(error)
    mismatch = first_mismatch([world.trace(rank) for rank in range(world.spec.size)])
    others = [f"rank {i}: {(r.error or {})['text']}" for i, r in enumerate(replies) if not r.ok and i != first]
    finished = [str(i) for i, r in enumerate(replies) if r.ok]
    if finished:
        others.append(f"rank{'s' if len(finished) > 1 else ''} {', '.join(finished)}: finished")
    detail = "\n".join(
        part
        for part in (
            error.get("traceback", "").rstrip(),
            f"--- the end of rank {first}'s output ---\n{world.log(first)}" if world.log(first) else "",
            "--- the other ranks ---\n" + "\n".join(others) if others else "",
        )
        if part
    )
    of = f"rank {first} of {world.spec.size}"
    if error["kind"] == "Violation":
        raise Violation(
            fields["expected"],
            f"{of}: {fields['actual']}" if world.spec.size > 1 else fields["actual"],
            where=fields["where"] or error["where"],
            hint=fields["hint"],
            detail=detail,
            repro=repro,
        )
    if mismatch and (error.get("hung") or others):
        expected, actual, where = mismatch
        raise Violation(expected, f"{actual}; then {of}: {error['text']}", where=where, detail=detail, repro=repro)
    raise Violation(
        "every rank runs to the end", f"{of}: {error['text']}", where=error["where"], detail=detail, repro=repro
    )


def raise_unjudged(error: dict[str, Any]) -> None:
    """Raise what a rank raised (see rank.describe) to say that nothing could be judged; nothing for other errors."""
    fields = error.get("fields", {})
    if error.get("kind") == "Unsupported":
        raise Unsupported(fields["what"])
    if error.get("kind") == "Blocked":
        raise Blocked(fields["reason"])
    if error.get("kind") == "NotTested":
        raise NotTested(fields["what"], fields.get("lacks", ""))


def first_mismatch(traces: list[list[str]]) -> tuple[str, str, str] | None:
    """Where ranks first issued different collectives: (expected, actual, where), or None.

    Calls in groups of some of the ranks, `... among 0,2`, are compared among those. A rank that stopped early is a
    mismatch only where another rank's next call differs from a third's; a shorter trace alone may just be the rank
    that failed.
    """
    groups = dict.fromkeys(group_of(call) for calls in traces for call in calls)
    for group in groups:
        members = [int(rank) for rank in group.split(",")] if group else range(len(traces))
        within = f" among ranks {group}" if group else ""
        kept = [[call for call in traces[rank] if group_of(call) == group] for rank in members if rank < len(traces)]
        for step, calls in enumerate(itertools.zip_longest(*kept)):
            issued = {
                call.split("  ")[0]: (rank, call)
                for rank, call in zip(members, calls, strict=False)
                if call is not None
            }
            if len(issued) > 1:
                (_, (rank_a, call_a)), (_, (rank_b, call_b)) = list(issued.items())[:2]
                return (
                    f"the same collective on every rank at call {step}{within}",
                    f"rank {rank_a}: {call_a.split('  ')[0]}, rank {rank_b}: {call_b.split('  ')[0]}",
                    call_b.split("  ")[-1],
                )
    return None


def group_of(call: str) -> str:
    """The ranks among which a line of a trace says it was called: "0,2", or "" for all."""
    return call.split("  ")[0].partition(" among ")[2]
