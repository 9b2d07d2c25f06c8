"""What a target really does on this machine, asked once in rank processes before the first requirement.

The answers decide what is *must* for it (claims), how its ranks get a process group, and what BLOCKED means. They are
facts, not verdicts: whether a fact is a failure is for the suites to say.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from nanochat_gate.requirement import Blocked, Unsupported

if TYPE_CHECKING:
    from nanochat_gate.rank import Rank
    from nanochat_gate.target import Target
    from nanochat_gate.world import Pool, Reply

MODULES = ("common", "flash_attention", "gpt", "optim", "muon", "adamw", "engine")


@dataclass
class Facts:
    """Plain data, so that it can cross to pytest's workers.

    modules: name -> "ok", "absent", or why importing it fails.
    cpu_init: what compute_init makes of a torchrun environment on CPU: "group", or what happens instead.
    step: what the target's own optimizer step does in a Gloo group as it stands: "ok", or what happens instead.
    alone: the single-process baseline needs a world of one with a process group.
    where: name -> file.py:12 of the places verdicts point at.
    """

    modules: dict[str, str] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    cpu_init: str = ""
    step: str = ""
    step_where: str = ""
    alone: bool = False
    claims: tuple[str, ...] = ()
    blocked: str = ""

    @property
    def group(self) -> str:
        """How ranks on CPU get their process group: "target" or "provided"."""
        return "target" if self.cpu_init == "group" else "provided"

    @property
    def withheld_lane(self) -> str:
        """Withheld collectives keep to the backend's own futures where the step works with those."""
        return "withheld-native" if self.step == "ok" else "withheld"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Facts:
        data = json.loads(text)
        return replace(Facts(**data), claims=tuple(data["claims"]))


def look(rank: Rank) -> dict[str, Any]:
    """Import each core module and note where things are."""
    target = rank.target
    modules: dict[str, str] = {}
    for name in MODULES:
        try:
            target.module(name)
            modules[name] = "ok"
        except Unsupported:
            modules[name] = "absent"
        except Blocked as error:
            modules[name] = error.reason
    where = {}
    if modules["common"] == "ok":
        common = target.module("common")
        for name in ("compute_init", "compute_cleanup", "get_dist_info", "get_base_dir"):
            where[name] = target.where(getattr(common, name, None))
    if modules["gpt"] == "ok":
        gpt = target.module("gpt").GPT
        for name in ("init_weights", "setup_optimizer", "setup_optimizers", "forward"):
            where[name] = target.where(getattr(gpt, name, None))
    if modules["flash_attention"] == "ok":
        with contextlib.suppress(Unsupported):
            namespace = target.attention()
            for name in ("flash_attn_func", "flash_attn_with_kvcache"):
                where[name] = target.where(getattr(namespace, name, None))
    alone = any(modules[m] == "ok" for m in ("optim", "muon", "adamw")) and target.splits_classes
    return {"modules": modules, "where": {k: v for k, v in where.items() if v}, "alone": alone}


def look_at_init(rank: Rank) -> str:
    """What compute_init does on CPU under torchrun's environment."""
    rank.rendezvous()
    try:
        rank.target.compute_init("cpu")
    except Exception as error:
        return f"compute_init raises {type(error).__name__}: {' '.join(str(error).split())}"
    if not dist.is_initialized():
        return "compute_init makes no process group: every rank trains alone"
    size, backend = dist.get_world_size(), rank.group_backend()
    if size != rank.size:
        return f"compute_init makes a group of {size} where torchrun started {rank.size}"
    return "group" if backend == "gloo" else f"compute_init makes a {backend} group on CPU"


def look_at_step(rank: Rank) -> str:
    """One step of the target's own optimizer in a group, as it stands."""
    model = rank.target.model(rank.device, n_layer=2)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone().fill_(0.125)
    for optimizer in rank.target.optimizers(model):
        optimizer.step()
    return "ok"


def gather(target: Target, pool: Pool, claims: tuple[str, ...] | None) -> Facts:
    """Ask all of it. Never raises for what the target does; Facts.blocked says why nothing can be judged."""
    from nanochat_gate.world import Spec

    ranks = json.dumps(target.for_ranks())
    facts = Facts(claims=claims or target.claims or ())
    alone = pool.take(Spec(ranks, 1, group=None, torchrun=False), fresh=True).call(__file__, "look", [], "look")
    if not alone[0].ok:
        facts.blocked = f"the target cannot be looked at: {_text(alone[0])}"
        return facts
    for name, value in alone[0].value.items():
        setattr(facts, name, value)
    if facts.modules["common"] != "ok":
        absent = facts.modules["common"] == "absent"
        facts.blocked = "the target has no module common.py" if absent else facts.modules["common"]
        return facts
    init = pool.take(Spec(ranks, 2, group=None), fresh=True).call(__file__, "look_at_init", [], "look_at_init")
    said = [reply.value if reply.ok else _text(reply) for reply in init]
    facts.cpu_init = next((words for words in said if words != "group"), "group")
    if facts.modules["gpt"] == "ok":
        world = pool.take(Spec(ranks, 2, group=facts.group), fresh=True)
        step = world.call(__file__, "look_at_step", [], "look_at_step")
        first = world.first
        facts.step = "ok" if first is None else _text(step[first])
        facts.step_where = "" if first is None else (step[first].error or {}).get("where", "")
    if claims is None and target.claims is None:
        facts.claims = ("cpu",) if facts.cpu_init == "group" else ("cuda",)
    return facts


def _text(reply: Reply) -> str:
    return str((reply.error or {}).get("text", ""))
