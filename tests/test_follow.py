"""Whether a turn did what its reminder asks: one case that must count and one that must not, per check."""

import pytest

from oprd.core.types import Observation, Reminder, ToolCall, Turn
from oprd.rollout.follow import followed


def turn(name, error=False, **arguments):
    return Turn((), (), call=ToolCall(name, arguments), observation=Observation("", is_error=error))


def edit(old, new, path="a.py", error=False):
    return turn("edit", error, path=path, old_string=old, new_string=new)


def run(command, error=False):
    return turn("bash", error, command=command)


def reminder(category, text=""):
    return Reminder(category, "R1", text, turn=0)


CASES = [
    ("hard_ambiguous_edit_old_string", "", edit("x", "y", error=True), edit("def f():\n  x", "y"), edit("x", "z", error=True)),
    ("hard_ambiguous_edit_old_string", "", edit("x", "y", error=True), edit("w\nx", "y"), edit("w\nx", "y", path="b.py")),
    ("hard_missing_file_path_narrow", "", turn("read", True, path="a"), turn("read", path="b"), turn("read", True, path="a")),
    ("named_path_over_neighbor", "Read src/a.py and edit only there.", turn("read", path="src/b.py"),
     turn("read", path="src/a.py"), turn("read", path="src/b.py")),
    ("assertion_diff_local_repair", "undo with `git checkout .` and more", run("python check.py", True),
     run("git checkout ."), turn("submit")),
    ("read_failing_test_first", "Run `python check.py` before the first edit.", turn("read", path="a"),
     run("python check.py"), edit("x", "y")),
    ("change_surface_budget_guard", "", edit("x", "y"), turn("submit"), edit("p", "q")),
    ("change_surface_budget_guard", "", edit("x", "y"), edit("y", "x"), run("ls")),
]


@pytest.mark.parametrize("category,text,before,good,bad", CASES)
def test_following_is_told_from_ignoring(category, text, before, good, bad):
    assert followed(reminder(category, text), [before], good)
    assert not followed(reminder(category, text), [before], bad)


def test_a_malformed_reply_follows_nothing():
    assert not followed(reminder("hard_missing_file_path_narrow"), [run("ls")], Turn((), ()))
