"""A task row is checked before any rollout: every mistake is one line with file, line, task and field."""

import json
import re

import pytest

from oprd.sandbox.jsonl import read_jsonl
from oprd.sandbox.task import read_tasks, task_from_row
from tests.sandbox_help import PATCH, TASK

ROW = TASK.to_row()
OUTSIDE = PATCH.replace("src/words.py", "../words.py")


def test_a_good_row_is_the_task_it_was_made_from():
    assert task_from_row(json.loads(json.dumps(ROW)), "f:1") == TASK
    assert task_from_row({**ROW, "patch": "", "files": None, "meta": None, "image_name": None}, "f:1").files == {}
    listed = {"test_cmd": ["make", "pytest -rA"]}
    assert task_from_row({**ROW, "install_config": listed}, "f:1").install_config == listed


@pytest.mark.parametrize("change,message", [
    ({"FAIL_TO_PASS": [3]}, "FAIL_TO_PASS[0] = 3 must be a test's name"),
    ({"FAIL_TO_PASS": ["a", None]}, "FAIL_TO_PASS[1] = None must be a test's name"),
    ({"PASS_TO_PASS": [""]}, "PASS_TO_PASS[0] = '' must be a test's name"),
    ({"PASS_TO_PASS": [["a"]]}, "PASS_TO_PASS[0] = ['a'] must be a test's name"),
    ({"patch": "fix it"}, "patch: not a git patch"),
    ({"test_patch": "--- a\n+++ b\n"}, "test_patch: not a git patch"),
    ({"patch": OUTSIDE}, "patch: '../words.py' is no path inside the repository"),
    ({"test_patch": PATCH.replace("src/", ".git/")}, "test_patch: .git/words.py is inside .git"),
    ({"patch": PATCH + "\ud800"}, "patch: holds a lone surrogate"),
    ({"install_config": {}}, "install_config.test_cmd = None must be the test command"),
    ({"install_config": {"test_cmd": ""}}, "install_config.test_cmd = '' must be the test command"),
    ({"install_config": {"test_cmd": []}}, "install_config.test_cmd = [] must be the test command"),
    ({"install_config": {"test_cmd": ["a", 3]}}, "install_config.test_cmd = ['a', 3] must be the test command"),
    ({"install_config": {"test_cmd": "a\0b"}}, "install_config.test_cmd = 'a\\x00b' must be the test command"),
    ({"install_config": {"test_cmd": "a", "log_parser": "unitest"}}, "install_config.log_parser = 'unitest' must be"),
    ({"install_config": {"test_cmd": "a", "log_parser": ["pytest"]}}, "install_config.log_parser = ['pytest'] must be"),
    ({"install_config": {"test_cmd": "a", "log_parser": None}}, "install_config.log_parser = None must be"),
    ({"files": ["a.py"]}, "files must be a JSON object, got list"),
    ({"files": {"a.py": 3}}, "files['a.py'] must be a text, got int"),
    ({"files": {"../a.py": ""}}, "files: '../a.py' is no path inside the repository"),
    ({"files": {"/etc/a": ""}}, "files: '/etc/a' is no path inside the repository"),
    ({"files": {"": ""}}, "files: '' is no path inside the repository"),
    ({"files": {"a//b": ""}}, "files: 'a//b' is no path inside the repository"),
    ({"files": {"a/": ""}}, "files: 'a/' is no path inside the repository"),
    ({"files": {"a\0": ""}}, "files: 'a\\x00' is no path inside the repository"),
    ({"files": {".git/hooks/post-commit": "rm"}}, "files: .git/hooks/post-commit is inside .git"),
    ({"files": {"a": "", "a/b": ""}}, "files: a is a file, and a folder of a/b"),
    ({"files": {"a.py": "\udfff"}}, "files['a.py']: holds a lone surrogate"),
    ({"meta": 5}, "meta must be a JSON object, got int"),
    ({"image_name": 5}, "image_name must be a string, got int"),
])
def test_a_bad_field_is_named_with_file_line_and_task(tmp_path, change, message):
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n" + json.dumps({**ROW, **change}) + "\n")
    with pytest.raises(ValueError, match=re.escape(f"tasks.jsonl:2: words-1: {message}")) as problem:
        read_tasks(path)
    assert "\n" not in str(problem.value)


def test_a_task_needs_a_name_of_its_own(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({**ROW, "instance_id": " "}))
    with pytest.raises(ValueError, match="tasks.jsonl:1: .*instance_id must not be empty"):
        read_tasks(path)
    path.write_text("\n".join(json.dumps({**ROW, "instance_id": name}) for name in ("a", "b", "a")))
    with pytest.raises(ValueError, match="tasks.jsonl:3: a: this instance_id stands already at .*tasks.jsonl:1"):
        read_tasks(path)


@pytest.mark.parametrize("data,message", [
    (b"[\n{}\n]\n", "f:1: not JSON .*one JSON array.*JSON lines"),
    (b"[{}]\n", "f:1: holds a JSON array; each line must be an object"),
    ('{"a": 1}\n{"a": "\u00e9"}\n'.encode("latin-1"), "f:2: not UTF-8 .*save the file as UTF-8"),
    ('{"a": 1}\n'.encode("utf-16"), "f:1: not UTF-8"),
    (b'{"a": 1}\n{"a": ', "f:2: not JSON .*cut off"),
])
def test_a_file_of_another_form_is_told_apart_from_a_line_cut_off(tmp_path, data, message):
    path = tmp_path / "f"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message):
        list(read_jsonl(path))


def test_a_byte_order_mark_is_passed_over(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"a": 1}\n')
    assert list(read_jsonl(path)) == [(f"{path}:1", {"a": 1})]
