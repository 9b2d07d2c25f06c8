"""Finds the nanochat in a checkout, from its files alone: nothing of a target is imported in pytest's process.

A fork may say what it is in its own pyproject.toml:

    [tool.nanochat-gate]
    package = "mychat"                # the folder with common.py and gpt.py; default: nanochat, else the only candidate
    claims = ["cpu", "cuda"]          # devices it claims to train on; default: what its compute_init can start
    environment = {MYCHAT_MODE = "1"} # set in every rank
    working-directory = "."           # where ranks run, relative to the checkout; default: a temporary folder
    train-module = "scripts.base_train"
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CLAIMS = ("cpu", "cuda")
_KEYS: dict[str, type] = {
    "package": str,
    "claims": list,
    "environment": dict,
    "working-directory": str,
    "train-module": str,
}
_WORDS: dict[type, str] = {str: "string", list: "list", dict: "table"}


class TargetError(Exception):
    """The checkout cannot be a target; the message is one sentence for the command line."""


@dataclass(frozen=True)
class Target:
    """A nanochat on disk.

    root: the checkout; import_root: what goes on sys.path; package: the import name.
    claims: None when neither the command line nor the fork's pyproject says.
    """

    root: Path
    import_root: Path
    package: str
    claims: tuple[str, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    cwd: str = ""
    train_module: str = "scripts.base_train"

    def for_ranks(self) -> dict[str, Any]:
        return {
            "root": str(self.root),
            "import_root": str(self.import_root),
            "package": self.package,
            "environment": self.environment,
            "cwd": self.cwd,
        }

    def commit(self) -> tuple[str, bool]:
        """(abbreviated commit or "", whether the working tree differs from it)."""
        git = ["git", "-C", str(self.root)]
        try:
            top = subprocess.run([*git, "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=True)
            if Path(top.stdout.strip()).resolve() != self.root:
                return "", False  # a plain folder inside somebody else's repository
            head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
            status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return "", False
        return head.stdout.strip(), bool(status.stdout.strip())


def find(path: str | Path) -> Target:
    """The target in `path`; TargetError says what is wrong with it and what was expected."""
    root = Path(path).expanduser().resolve()
    if not root.is_dir():
        raise TargetError(f"--nanochat {path}: no such folder; give the path of a nanochat checkout")
    said = _pyproject(root)
    package_folder = _package(root, said.get("package"))
    claims = said.get("claims")
    if claims is not None:
        claims = check_claims(claims, f"{root.name}/pyproject.toml")
    cwd = said.get("working-directory")
    if cwd and not (root / cwd).is_dir():
        raise TargetError(
            f"{root.name}/pyproject.toml, [tool.nanochat-gate]: working-directory {cwd!r} is no folder of the checkout"
        )
    return Target(
        root=root,
        import_root=package_folder.parent,
        package=package_folder.name,
        claims=claims,
        environment={str(k): str(v) for k, v in said.get("environment", {}).items()},
        cwd=str((root / cwd).resolve()) if cwd else "",
        train_module=said.get("train-module", "scripts.base_train"),
    )


def check_claims(claims: list[str] | tuple[str, ...], source: str) -> tuple[str, ...]:
    unknown = [claim for claim in claims if claim not in CLAIMS]
    if unknown:
        words = ", ".join(map(str, unknown))
        raise TargetError(f"{source}: unknown claim {words}; a fork can claim {', '.join(CLAIMS)}")
    return tuple(dict.fromkeys(claims))


def _pyproject(root: Path) -> dict[str, Any]:
    file = root / "pyproject.toml"
    if not file.is_file():
        return {}
    try:
        said: dict[str, Any] = tomllib.loads(file.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{file.name} of {root.name} is not valid TOML ({error}); mend it or remove it") from None
    for table in ("tool", "nanochat-gate"):
        said = said.get(table, {})
        if not isinstance(said, dict):
            raise TargetError(f"{root.name}/pyproject.toml: {table} is a table, not {said!r}")
    for key, kind in _KEYS.items():
        if not isinstance(said.get(key, kind()), kind):
            raise TargetError(
                f"{root.name}/pyproject.toml, [tool.nanochat-gate]: {key} is a {_WORDS[kind]}, not {said[key]!r}"
            )
    if unknown := sorted(set(said) - set(_KEYS)):
        raise TargetError(
            f"[tool.nanochat-gate] in {root.name}/pyproject.toml has unknown keys {', '.join(unknown)}; "
            f"known are {', '.join(sorted(_KEYS))}"
        )
    return said


def _package(root: Path, named: str | None) -> Path:
    places = [place for place in (root, root / "src") if place.is_dir()]
    if named:
        for place in places:
            if (place / named).is_dir():
                return place / named
        raise TargetError(f"[tool.nanochat-gate] names package {named!r}, which is no folder of {root}")
    for place in places:
        if (place / "nanochat" / "common.py").is_file():
            return place / "nanochat"
    found = [
        folder
        for place in places
        for folder in sorted(place.iterdir())
        if (folder / "common.py").is_file() and (folder / "dataloader.py").is_file()
    ]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(folder.name for folder in found)
        raise TargetError(
            f"{root} has several folders that could be nanochat ({names}); "
            "name one as package under [tool.nanochat-gate] in its pyproject.toml"
        )
    raise TargetError(
        f"no nanochat in {root}: expected a folder nanochat/ with common.py, or one folder with common.py and "
        "dataloader.py; give the top folder of a checkout"
    )
