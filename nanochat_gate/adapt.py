"""One interface over the revisions of nanochat. Used inside ranks only: this is where a target is imported.

Everything asks what the target has, never what it is called or how old it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nanochat_gate import standins
from nanochat_gate.requirement import Blocked, Unsupported

# Small enough for a step in milliseconds; the vocabulary divides by 2, 3 and 4 ranks and by the padding of 64.
TINY: dict[str, Any] = {
    "sequence_len": 32,
    "vocab_size": 192,
    "n_layer": 4,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 64,
    "window_pattern": "SSSL",
}


class Target:
    def __init__(self, spec: dict[str, Any]) -> None:
        self.root: str = spec["root"]
        self.prefix = os.path.join(self.root, "")
        self.package: str = spec["package"]
        self._own_groups: list[dict[str, Any]] | None = None

    # -- modules -------------------------------------------------------------------------------------------------

    def module(self, name: str) -> ModuleType:
        """`package.name`. Unsupported when the target has no such file, Blocked when importing it fails."""
        full = f"{self.package}.{name}"
        if full in sys.modules:
            return sys.modules[full]
        folder = os.path.join(self.folder, *name.split("."))
        if not os.path.isfile(folder + ".py") and not os.path.isdir(folder):
            raise Unsupported(f"the target has no module {name}.py")
        try:
            module = importlib.import_module(full)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            raise Blocked(f"importing {full} fails: {type(error).__name__}: {' '.join(str(error).split())}") from error
        self.check_origin()
        return module

    @property
    def folder(self) -> str:
        for place in (self.root, os.path.join(self.root, "src")):
            if os.path.isdir(os.path.join(place, self.package)):
                return os.path.join(place, self.package)
        raise Blocked(f"{self.package} has gone from {self.root}")

    def has(self, name: str) -> bool:
        return os.path.isfile(os.path.join(self.folder, *name.split(".")) + ".py")

    def modules(self) -> dict[str, ModuleType]:
        """The target's modules that are imported by now."""
        return {n: m for n, m in sys.modules.items() if n == self.package or n.startswith(self.package + ".")}

    def check_origin(self) -> None:
        """Every module named like the target must lie under it, or something else is being judged in its place."""
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if name.split(".")[0] in (self.package, "nanochat") and file and not _under(file, self.root):
                raise Blocked(f"{name} was imported from {file}, outside the target {self.root}")

    # -- start and stop --------------------------------------------------------------------------------------------

    @property
    def init_takes_device(self) -> bool:
        return bool(inspect.signature(self.module("common").compute_init).parameters)

    def compute_init(self, device_type: str) -> Any:
        """The target's compute_init, with the device where it takes one."""
        common = self.module("common")
        return common.compute_init(device_type) if self.init_takes_device else common.compute_init()

    def compute_cleanup(self) -> Any:
        return self.module("common").compute_cleanup()

    # -- model -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def builds_on_meta(self) -> bool:
        """Whether models are made on the meta device. False where the target makes them but never calls to_empty."""
        folders = (Path(self.folder), Path(self.root, "scripts"))
        files = [file for folder in folders for file in folder.rglob("*.py")]
        texts = [file.read_text(errors="replace").replace("class GPT(", "") for file in files]
        return any("to_empty(" in text for text in texts) or not any("GPT(" in text for text in texts)

    def config(self, **wanted: Any) -> Any:
        """TINY with changes, less the fields this target's GPTConfig does not have."""
        kind = self.module("gpt").GPTConfig
        fields = {f.name for f in dataclasses.fields(kind)}
        return kind(**{k: v for k, v in (TINY | wanted).items() if k in fields})

    def model(
        self, device: torch.device | str = "cpu", *, poison: bool = True, integers: int = -1, **wanted: Any
    ) -> torch.nn.Module:
        """A GPT made as the training script makes it: on the meta device, to_empty, init_weights (see builds_on_meta).

        poison: fill parameters and buffers with NaN after to_empty, as memory left by somebody else would be;
        those that cannot be NaN are filled with `integers`.
        """
        on_meta = self.builds_on_meta
        with _quiet(), torch.device("meta" if on_meta else device):
            model: torch.nn.Module = self.module("gpt").GPT(self.config(**wanted))
        if on_meta:
            model.to_empty(device=device)
        if on_meta and poison:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else integers)
        with _quiet():
            model.init_weights()  # type: ignore[operator]
        return model

    def loss(self, model: torch.nn.Module, x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats, a scalar."""
        out = model(x_BT, targets=y_BT)
        if isinstance(out, (tuple, list)):
            out = next(o for o in reversed(out) if isinstance(o, torch.Tensor) and o.ndim == 0)
        assert isinstance(out, torch.Tensor)
        return out

    def logits(self, model: torch.nn.Module, x_BT: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """(B, T, V) logits."""
        out = model(x_BT, **kwargs)
        if isinstance(out, (tuple, list)):
            out = out[0]
        assert isinstance(out, torch.Tensor)
        return out

    # -- optimizers ------------------------------------------------------------------------------------------------

    def optimizers(self, model: torch.nn.Module, **wanted: Any) -> list[torch.optim.Optimizer]:
        """What the target's own setup makes of the model, always as a list."""
        setup = getattr(model, "setup_optimizer", None) or getattr(model, "setup_optimizers", None)
        if setup is None:
            raise Unsupported("the model has neither setup_optimizer nor setup_optimizers")
        known = inspect.signature(setup).parameters
        with _quiet():
            made = setup(**{k: v for k, v in wanted.items() if k in known})
        return list(made) if isinstance(made, (list, tuple)) else [made]

    def _optimizer_class(self, *names: str) -> Any:
        for module_name in ("optim", "muon", "adamw"):
            if self.has(module_name):
                module = self.module(module_name)
                for name in names:
                    if hasattr(module, name):
                        return getattr(module, name)
        return None

    @property
    def splits_classes(self) -> bool:
        """Whether one process and many use different classes (then the baseline is a world of one with a group)."""
        return self._optimizer_class("DistMuonAdamW", "DistMuon", "DistAdamW") is not None

    def build_optimizers(self, groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
        """Optimizers over hand-made groups for use with a process group (or without one where one class does both).

        groups: dicts with kind "adamw" (lr, betas, eps, weight_decay) or "muon" (lr, momentum, ns_steps, beta2,
        weight_decay) and params; keys that a target's class does not know are left out.
        """
        combined = self._optimizer_class("DistMuonAdamW") or self._optimizer_class("MuonAdamW")
        with _quiet():
            if combined is not None:
                return [combined([{**self._own_options(group["kind"]), **group} for group in groups])]
            made = []
            for kind, names in (("adamw", ("DistAdamW", "AdamW")), ("muon", ("DistMuon", "Muon"))):
                of_kind = [group for group in groups if group["kind"] == kind]
                if not of_kind:
                    continue
                factory = self._optimizer_class(*names)
                if factory is None:
                    raise Unsupported(f"the target has no optimizer class for {kind} groups")
                known = inspect.signature(factory).parameters.keys() - {"params"}
                options = [{k: v for k, v in group.items() if k in known} for group in of_kind]
                params = [list(group["params"]) for group in of_kind]
                if kind == "adamw":  # one optimizer with groups, as the target's own setup makes it
                    made.append(factory([{"params": p, **o} for p, o in zip(params, options, strict=True)]))
                else:  # takes parameters and makes groups of its own
                    made += [factory(p, **o) for p, o in zip(params, options, strict=True)]
            return made

    def _own_options(self, kind: str) -> dict[str, Any]:
        """Plain options that the target's own setup gives groups of a kind; its step may read more than we know of."""
        if self._own_groups is None:
            self._own_groups = []
            with torch.device("meta"), contextlib.suppress(Exception):
                model = self.module("gpt").GPT(self.config(n_layer=2))
                self._own_groups = [group for made in self.optimizers(model) for group in made.param_groups]
        own = next((group for group in self._own_groups if group.get("kind") == kind), {})
        plain = (bool, int, float, str, tuple, type(None))
        return {k: v for k, v in own.items() if isinstance(v, plain) and not k.startswith("initial_")}

    # -- attention -------------------------------------------------------------------------------------------------

    def attention(self) -> Any:
        """The namespace with flash_attn_func and flash_attn_with_kvcache, tensors (B, T, H, D)."""
        module = self.module("flash_attention")
        for place in (getattr(module, "flash_attn", None), module):
            if hasattr(place, "flash_attn_func"):
                return place
        raise Unsupported("the target's flash_attention.py has no flash_attn_func")

    @functools.cached_property
    def _kv_cache_class(self) -> Any:
        try:
            return self.module("engine").KVCache
        except Blocked as blocked:
            if not isinstance(blocked.__cause__, ModuleNotFoundError):
                raise
            try:
                return standins.import_without(f"{self.package}.engine", self.package).KVCache
            except Exception as error:
                raise blocked from error

    def kv_cache(self, **wanted: Any) -> Any:
        """engine.KVCache; arguments: batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype."""
        kind = self._kv_cache_class
        known = inspect.signature(kind).parameters
        return kind(**{k: v for k, v in wanted.items() if k in known})

    # -- places ----------------------------------------------------------------------------------------------------

    def where(self, thing: Any) -> str:
        """`file.py:12` of a function or class of the target, relative to it; "" when unknown."""
        with contextlib.suppress(TypeError, OSError):
            thing = inspect.unwrap(thing)
            file, line = inspect.getsourcefile(thing), inspect.getsourcelines(thing)[1]
            if file and _under(file, self.root):
                return f"{os.path.relpath(file, self.root)}:{line}"
        return ""


def _under(file: str, folder: str) -> bool:
    return os.path.realpath(file).startswith(os.path.join(os.path.realpath(folder), ""))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A target prints as it builds; keep a rank's log for what goes wrong."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
