"""A target's own scripts (`base_train`, `tok_train`): where they are and which flags they have, from their files alone.

Two ways of taking flags exist: argparse, and a configurator that overwrites the script's module-level assignments.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from nanochat_gate.requirement import Unsupported
from nanochat_gate.target import Target


@dataclass(frozen=True)
class Script:
    """module: the import name, as after `python -m`; path: on sys.path for it; flags: name with _ -> as written."""

    module: str
    path: str
    file: Path
    flags: dict[str, str]

    def argv(self, **wanted: object) -> list[str]:
        """The wanted flags that this script has, as command-line words; names are written with _ here."""
        return [f"--{self.flags[name]}={value}" for name, value in wanted.items() if name in self.flags]


def find(target: Target, name: str = "") -> Script:
    """The script `name`, default the training script; Unsupported when the target has none."""
    train = target.train_module
    module = train if not name else ".".join([*train.split(".")[:-1], name])
    inside = f"{target.package}.{module}"
    for place in (target.root, target.import_root):
        for candidate in (module, inside):
            file = place.joinpath(*candidate.split(".")).with_suffix(".py")
            if file.is_file():
                return Script(candidate, str(place), file, _flags(file))
    raise Unsupported(f"the target has no script {module}")


def _flags(file: Path) -> dict[str, str]:
    tree = ast.parse(file.read_text())
    if any(isinstance(node, ast.Constant) and "configurator" in str(node.value) for node in ast.walk(tree)):
        names = [
            t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        ]
        return {name: name for name in names}
    first = [node.args[0] for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    words = [a.value for a in first if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    flags = [word[2:] for word in words if word.startswith("--")]
    return {flag.replace("-", "_"): flag for flag in flags}
