"""Faults, and the edits of a syntax tree that make them."""

import ast
import shutil
from dataclasses import dataclass
from pathlib import Path

import libcst as cst

ROOT = Path(__file__).resolve().parents[2]


class EditError(Exception):
    """An edit does not fit the reference: the catalogue is wrong, not the reference."""


@dataclass(frozen=True)
class Edit:
    """Replace `find` by `put` in the function or class `inside` (dotted; "" is the whole file) of `file`.

    nth: which of several places, counting from 1; 0 means that there must be exactly one.
    """

    file: str
    inside: str
    find: str
    put: str
    nth: int = 0


@dataclass(frozen=True, init=False)
class Fault:
    """A named break of the reference: why it is harmful, its edits, and the ids that must catch it.

    trains:   ranks still train with falling loss, so nobody would notice.
    hangs:    the ids may be red by time-out alone.
    uncaught: why nothing catches it yet; it must then go uncaught.
    sizes:    the world sizes it is looked for at.
    """

    name: str
    harm: str
    edits: tuple[Edit, ...]
    ids: tuple[str, ...]
    trains: bool
    hangs: bool
    uncaught: str
    sizes: tuple[int, ...]

    def __init__(self, name, harm, *edits, ids, trains=True, hangs=False, uncaught="", sizes=(1, 2)):
        given = dict(name=name, harm=harm, edits=edits, ids=ids, sizes=sizes)
        for field, value in {**given, "trains": trains, "hangs": hangs, "uncaught": uncaught}.items():
            object.__setattr__(self, field, value)


def make_copy(folder):
    """The reference alone, with what it claims, as a checkout of its own in `folder`."""
    folder = Path(folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "nanochat", folder / "nanochat", ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder / "pyproject.toml")
    return folder


def apply(edits, folder):
    """Make the edits in a checkout. Raises EditError where one does not fit."""
    for edit in edits:
        file = Path(folder) / edit.file
        if not file.is_file():
            raise EditError(f"there is no {edit.file}")
        file.write_text(edited(file.read_text(), edit))


def edited(source, edit):
    """`source` with the edit made in it; EditError when it fits nowhere, in several places, or changes nothing."""
    finder = _Replace(edit)
    after = cst.parse_module(source).visit(finder).code
    named = f"{edit.file}, in {edit.inside or 'the module'}: {edit.find!r}"
    if edit.inside and not finder.entered:
        raise EditError(f"{named}: there is no such function or class")
    if not finder.found:
        raise EditError(f"{named} was not found")
    if finder.found > 1 and not edit.nth:
        raise EditError(f"{named} was found {finder.found} times; say which with nth=")
    if edit.nth > finder.found:
        raise EditError(f"{named} was found {finder.found} times, fewer than nth={edit.nth}")
    if ast.dump(ast.parse(after)) == ast.dump(ast.parse(source)):
        raise EditError(f"{named} -> {edit.put!r} changes nothing")
    return after


def _expression(text):
    """The text as an expression's canonical form, or None when it is none."""
    try:
        return ast.dump(ast.parse(f"(\n{text}\n)", mode="eval"))
    except SyntaxError:
        return None


class _Replace(cst.CSTTransformer):
    """Counts the places that match and replaces the one that is wanted."""

    def __init__(self, edit):
        super().__init__()
        self.path = edit.inside.split(".") if edit.inside else []
        self.nth = edit.nth or 1
        self.scope = []
        self.found = 0
        self.entered = not self.path
        if not edit.put.strip():
            raise EditError(f"{edit.find!r}: nothing to put in its place; drop a statement with 'pass'")
        wanted, put = _expression(edit.find), _expression(edit.put)
        self.of_expression = wanted is not None and put is not None
        if self.of_expression:
            if edit.find.strip().isidentifier():
                raise EditError(f"{edit.find!r}: a bare name matches too much; give the expression around it")
            self.wanted = wanted
            self.put = cst.parse_expression(f"({edit.put.strip()})")
            self.kind = type(cst.parse_expression(edit.find.strip()))
        else:
            try:
                (statement,) = ast.parse(edit.find).body
                self.put = cst.parse_module(edit.put.strip("\n") + "\n").body
            except (SyntaxError, ValueError, cst.ParserSyntaxError) as error:
                raise EditError(f"{edit.find!r} -> {edit.put!r}: not expressions, nor statements ({error})") from None
            self.wanted = ast.dump(statement)
            self.kind = type(cst.parse_module(edit.find.strip("\n") + "\n").body[0])

    def on_visit(self, node):
        if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            self.scope.append(node.name.value)
            self.entered = self.entered or self.inside
        return True

    @property
    def inside(self):
        return self.scope[: len(self.path)] == self.path

    def on_leave(self, original, updated):
        here = self.inside
        if isinstance(original, (cst.FunctionDef, cst.ClassDef)):
            self.scope.pop()
        if not here or type(original) is not self.kind or self.form(original) != self.wanted:
            return updated
        self.found += 1
        if self.found != self.nth:
            return updated
        return self.put if self.of_expression else cst.FlattenSentinel(self.put)

    def form(self, node):
        if self.of_expression:
            return _expression(cst.Module([]).code_for_node(node))
        try:
            return ast.dump(ast.parse(cst.Module([node]).code).body[0])
        except (SyntaxError, IndexError):
            return None
