"""An edit finds its place whatever the layout, and one that fits nowhere or several times is refused."""

import pytest

from tests.faults.edit import Edit, EditError, Fault, apply, edited, make_copy

SOURCE = """
LIMIT = 3  # of something


class Box:
    def put(self, x):
        y = f(x, 'a')[0]  # keep
        return [
            g(
                y,  # first
                1,
            )
        ]

    def get(self):
        return g(y, 1) + g(y, 2)


def get():
    if LIMIT:
        wait()
    return g(y, 1)
"""


def change(inside, find, put, nth=0):
    return edited(SOURCE, Edit("box.py", inside, find, put, nth))


@pytest.mark.parametrize(
    ("inside", "find", "put", "gone", "there"),
    [
        ("Box.put", "g(y, 1)", "h()", "y,  # first", "h()"),
        ("Box.put", 'f(x, "a")', "x", "f(x", "y = (x)[0]"),
        ("", "LIMIT = 3", "LIMIT = 4", "LIMIT = 3", "LIMIT = 4"),
        ("get", "wait()", "pass", "wait", "pass"),
        ("get", "if LIMIT:\n    wait()", "for _ in range(2):\n    wait()", "if LIMIT", "for _ in range(2):"),
        ("Box.get", "return g(y, 1) + g(y, 2)", "x = 1\nreturn x", "g(y, 2)", "x = 1\n        return x"),
        ("Box", "y = f(x, 'a')[0]", "y = x", "f(x", "y = x"),
    ],
)
def test_finds_by_syntax(inside, find, put, gone, there):
    after = change(inside, find, put)
    assert gone not in after
    assert there in after
    compile(after, "box.py", "exec")


def test_only_the_place_asked_for_changes():
    after = change("Box.put", "y = f(x, 'a')[0]", "y = 1")
    assert after == SOURCE.replace("y = f(x, 'a')[0]  # keep", "y = 1")


def test_nth_of_several():
    after = change("", "g(y, 1)", "g(9)", nth=2)
    assert after == SOURCE.replace("g(y, 1) + g(y, 2)", "(g(9)) + g(y, 2)")


@pytest.mark.parametrize(
    ("inside", "find", "put", "nth", "why"),
    [
        ("", "g(y, 3)", "g(y, 1)", 0, "was not found"),
        ("", "g(y, 1)", "g(9)", 0, "was found 3 times"),
        ("", "g(y, 1)", "g(9)", 4, "fewer than nth=4"),
        ("Box.get", "wait()", "pass", 0, "was not found"),
        ("Bux", "wait()", "pass", 0, "no such function or class"),
        ("get", "g(y, 1)", "g(y,1)", 0, "changes nothing"),
        ("get", "g(y, 1", "pass", 0, "not expressions, nor statements"),
        ("get", "wait()", "return (", 0, "not expressions, nor statements"),
        ("get", "wait()", "", 0, "nothing to put"),
        ("get", "wait(); wait()", "pass", 0, "not expressions, nor statements"),
        ("", "LIMIT", "4", 0, "a bare name"),
    ],
)
def test_refuses(inside, find, put, nth, why):
    with pytest.raises(EditError, match=why.replace("(", r"\(")):
        change(inside, find, put, nth)


def test_edits_follow_one_another_on_a_copy_of_the_reference(tmp_path):
    tree = make_copy(tmp_path / "tree")
    common = tree / "nanochat" / "common.py"
    before = common.read_text()
    fault = Fault(
        "seed-named",
        "none",
        Edit("nanochat/common.py", "", "import os", "import os\nSEED = 42"),
        Edit("nanochat/common.py", "compute_init", "torch.manual_seed(42)", "torch.manual_seed(SEED)"),
        ids=(),
    )
    apply(fault.edits, tree)
    assert common.read_text().replace("(torch.manual_seed(SEED))", "torch.manual_seed(42)") == before.replace(
        "import os\n", "import os\nSEED = 42\n", 1
    )
    with pytest.raises(EditError, match=r"there is no nanochat/nothing\.py"):
        apply([Edit("nanochat/nothing.py", "", "x = 1", "x = 2")], tree)
