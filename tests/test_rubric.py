"""The rubric as data: the paper's inventory, and clear errors for a user's own file."""

from collections import Counter

import pytest

from oprd.rollout.rubric import MICRO, load_rubric
from oprd.rollout.rules import RULES
from oprd.rollout.toolresult import ToolResult

NEW_RULE = """
[hard_python_syntax]
class = "R1"
family = "hard"
provenance = "ours"
trigger = "Python could not parse a file."
action = "Fix the reported line first."
output = "^SyntaxError: "
command = "python"
"""


def user(tmp_path, text):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    return file


def test_the_rubric_has_the_papers_inventory():
    rubric = load_rubric()
    assert len(rubric.hard) == 10 and len(rubric.contextual) == 22
    assert Counter(c.class_ for c in rubric.categories.values()) == {"R1": 10, "R2": 10, "R3": 5, "R4": 7}
    assert Counter(c.family for c in rubric.contextual) == {
        "scope_patch_slot": 5, "scenario_condition_slot": 5, "source_path_slot": 5, "post_edit_drift_slot": 3,
        "validation_wrapup_slot": 4}
    assert sum(c.provenance == "ours" for c in rubric.categories.values()) == 14
    assert [c.name for c in rubric.hard] == list(RULES)


def test_the_text_of_every_category_is_short_and_no_two_are_the_same():
    for rubric in (load_rubric(), load_rubric(MICRO)):
        actions = [c.action for c in rubric.categories.values()]
        assert len(set(actions)) == len(actions) and max(len(a.split()) for a in actions) <= 27


def test_slots_are_filled_from_what_is_given_and_an_unfilled_one_is_an_error():
    category = load_rubric(MICRO)["named_path_over_neighbor"]
    text = category.text(path="src/a.py")
    assert text == "Not this file: the task names src/a.py. Read src/a.py and edit only there."
    with pytest.raises(KeyError):
        category.text(name="x")


def test_a_users_file_adds_replaces_and_disables(tmp_path):
    rubric = load_rubric(user(tmp_path, NEW_RULE + "[hard_go_compile_error]\nenabled = false\n"
                                                   "[one_condition_repair]\naction = \"Mine.\"\n"))
    assert "hard_go_compile_error" not in rubric and rubric["one_condition_repair"].action == "Mine."
    assert rubric["one_condition_repair"].class_ == "R3"
    seen = ToolResult("bash", {"command": "python a.py"}, 1, True, 'File "a.py", line 1\nSyntaxError: invalid syntax')
    assert rubric["hard_python_syntax"].match(seen) == "SyntaxError: invalid syntax"
    for other in (ToolResult("bash", {"command": "python a.py"}, 0, False, seen.output),
                  ToolResult("bash", {"command": "cat log"}, 1, True, seen.output)):
        assert rubric["hard_python_syntax"].match(other) is None


def test_a_users_rule_can_be_tied_to_a_tool_and_told_when_not_to_fire(tmp_path):
    tied = NEW_RULE + "tool = \"^Bash$\"\nunless = \"--check|future\""
    rule = load_rubric(user(tmp_path, tied))["hard_python_syntax"]
    shown = "SyntaxError: from __future__ must come first\nSyntaxError: invalid syntax"

    def match(tool, command, output=shown):
        return rule.match(ToolResult(tool, {"command": command}, 1, True, output))

    assert match("Bash", "python a.py") == "SyntaxError: invalid syntax"
    assert match("bash", "python a.py") is None and match("Bash", "python a.py --check") is None
    assert match("Bash", "python a.py", shown.split("\n")[0]) is None


def test_a_built_in_hard_rule_is_replaced_by_patterns_of_the_users(tmp_path):
    text = '[hard_malformed_search]\ncommand = "^csearch "\noutput = "bad pattern"\naction = "Quote it."\n'
    rule = load_rubric(user(tmp_path, text))["hard_malformed_search"]
    assert rule.match(ToolResult("bash", {"command": "csearch a("}, 2, True, "csearch: bad pattern"))
    assert rule.match(ToolResult("bash", {"command": "rg 'a('"}, 2, True, "rg: regex parse error:")) is None
    assert rule.action == "Quote it."


@pytest.mark.parametrize("text, message", [
    (NEW_RULE.replace('"R1"', '"R9"'),
     "hard_python_syntax: class = 'R9' must be one of R1, R2, R3, R4; did you mean R4?"),
    (NEW_RULE.replace('"hard"', '"soft"'), "family = 'soft' must be one of"),
    (NEW_RULE.replace('trigger = "Python could not parse a file."', ""), "has no field trigger"),
    (NEW_RULE.replace("trigger", "trigger_"), "has an unknown field trigger_; did you mean trigger?"),
    (NEW_RULE + NEW_RULE, "is a category named twice?"),
    (NEW_RULE.replace('output = "^SyntaxError: "', ""), "hard_python_syntax: output is missing"),
    ("[hard_go_compile_error]\ncommand = \"x\"", "hard_go_compile_error: output is missing"),
    ("[hard_go_compile_eror]\nenabled = false", "has no field class; did you mean hard_go_compile_error?"),
    (NEW_RULE + "unless = \"[\"", "hard_python_syntax: unless = '[' is no regular expression"),
    (NEW_RULE.replace("^SyntaxError", "(SyntaxError"), "is no regular expression"),
    (NEW_RULE.replace("reported line", "line {line}"), "holds the slot {line}, but a hard rule's"),
    ("[one_condition_repair]\naction = \"See {file}.\"", "unknown slot {file}; did you mean line?"),
    ("[one_condition_repair]\nenabled = \"no\"", "enabled = 'no' must be true or false"),
    ("[one_condition_repair]\naction = \"\"", "action = '' must be a non-empty text"),
    ("[one_condition_repair]\noutput = \"x\"", "belongs to hard rules"),
    ("enabled = false", "enabled stands outside a category"),
    ("[broken", "not a TOML file"),
])
def test_a_bad_file_is_one_line_that_names_file_category_and_field(tmp_path, text, message):
    file = user(tmp_path, text)
    with pytest.raises(ValueError) as raised:
        load_rubric(file)
    assert message in str(raised.value) and str(raised.value).startswith(str(file))
    assert "\n" not in str(raised.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.toml does not exist"):
        load_rubric(tmp_path / "nowhere.toml")
