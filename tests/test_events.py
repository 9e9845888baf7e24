"""Error events: each category at most once in a trajectory, without the caps that reminders have."""

from oprd.core.types import Ending, Observation, ToolCall, Trajectory, Turn
from oprd.rollout.audit import each_boundary
from oprd.rollout.events import count_by_category, count_by_class, error_events
from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.scripted import ScriptedJudge
from oprd.rollout.select import SelectSettings

RUBRIC = load_rubric(MICRO)
STATEMENT = '`kemi` in `src/zuvo.py` must return "lami", `src/bado.py` is right.'
DONE = Observation("The file has been updated.")


def read(path):
    return ToolCall("read", {"path": path}), Observation("text")


def edit(path, seen=DONE):
    return ToolCall("edit", {"path": path, "old_string": "x", "new_string": "y"}), seen


AMBIGUOUS = edit("src/zuvo.py", Observation("Found 2 matches of the string to replace, but", None, True))
FAILED = ToolCall("bash", {"command": "python check.py"}), Observation("FAIL test_kemi: 'a' != 'b'\nfailed 1", 1, True)


def events(*turns, statement=STATEMENT, **settings):
    told = Trajectory("a", "t", tuple(Turn((1,), (2,), call=c, observation=o) for c, o in turns), (9,),
                      Ending.TURN_LIMIT)
    return error_events(statement, told, RUBRIC, each_boundary(ScriptedJudge(RUBRIC)), SelectSettings(**settings))


def test_a_category_counts_once_at_its_first_turn_and_caps_play_no_part():
    found = events(read("src/bado.py"), edit("src/bado.py"), AMBIGUOUS, AMBIGUOUS, FAILED, FAILED, budget=0)
    assert [(e.category, e.class_, e.turn) for e in found] == [
        ("named_path_over_neighbor", "R2", 0), ("edit_scope_evidence_guard", "R4", 1),
        ("hard_ambiguous_edit_old_string", "R1", 2), ("assertion_diff_local_repair", "R4", 4)]


def test_one_boundary_may_show_two_errors():
    both = FAILED[0], Observation("FAIL test_kemi: 'a' != 'b'\nFAIL test_bolo: 'c' != 'd'\nfailed 2", 1, True)
    assert {e.category for e in events(edit("src/zuvo.py"), both)} == {"sibling_scenario_invariant",
                                                                       "assertion_diff_local_repair"}


def test_the_gates_that_look_at_the_case_alone_still_hold():
    assert events(AMBIGUOUS, classes=("R2",)) == () and events(read("src/bado.py"), confidence=0.99) == ()


def test_editing_before_the_named_test_was_read_is_an_error_and_running_it_first_is_none():
    asks = "`kemi` in `src/zuvo.py` returns a wrong word, the tests tell the right one."
    assert [e.category for e in events(read("src/zuvo.py"), edit("src/zuvo.py"), statement=asks)] == [
        "read_failing_test_first"]
    assert events(read("src/zuvo.py"), FAILED, edit("src/zuvo.py"), statement=asks) == ()


def test_counts_over_trajectories_name_all_four_classes():
    many = [events(AMBIGUOUS, FAILED), events(AMBIGUOUS), events(read("src/zuvo.py"))]
    assert count_by_class(many) == {"R1": 2, "R2": 0, "R3": 0, "R4": 0}
    assert count_by_category(many) == {"hard_ambiguous_edit_old_string": 2}
