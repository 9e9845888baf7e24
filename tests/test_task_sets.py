"""Rows of every published task set become tasks; rows that cannot be used are named and counted."""

import json
import logging
import subprocess
from pathlib import Path

import pytest

from oprd.core.settings import Data
from oprd.rollout.tasks import read_tasks
from oprd.sandbox.patches import added_files, file_changes
from oprd.sandbox.task import task_from_row
from oprd.sandbox.task_sets import SetOptions, read_row, read_rows
from tests.sandbox_help import PATCH, TASK, TEST_PATCH

SHA = "0123456789abcdef0123456789abcdef01234567"
COMMON = {"base_commit": SHA, "patch": PATCH, "test_patch": TEST_PATCH, "problem_statement": "add() subtracts."}
REBENCH = {**COMMON, "instance_id": "owner__name-7", "repo": "Owner/Name", "created_at": 1609298073000,
           "language": "go",
           "FAIL_TO_PASS": ["TestA"], "PASS_TO_PASS": ["TestB"], "interface": "No new interfaces are introduced.",
           "image_name": "docker.io/swerebenchv2/owner-name:7-0123456",
           "install_config": {"base_image_name": "go:1.22", "docker_specs": None, "install": ["go mod download"],
                              "log_parser": "parse_log_gotest", "log_parsers": None, "test_cmd": ["go test -v ./..."]},
           "meta": {"llm_metadata": [{"code": "A", "difficulty": "easy"}]}}
BENCH = {**COMMON, "instance_id": "django__django-11099", "repo": "django/django", "version": "3.0", "hints_text": "",
         "created_at": "2019-01-01T00:00:00Z", "environment_setup_commit": SHA, "difficulty": "<15 min fix",
         "FAIL_TO_PASS": '["test_a (auth.tests.T)"]', "PASS_TO_PASS": '["Says what it does."]'}
SCRIPT = """#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate
cd /testbed
git config --global --add safe.directory /testbed
git checkout 0123 tests/test_words.py
git apply -v - <<'EOF_114329324912'
diff --git a/tests/test_words.py b/tests/test_words.py
+: '>>>>> Start Test Output'
EOF_114329324912
: '>>>>> Start Test Output'
go test -v ./... -run "TestA"
: '>>>>> End Test Output'
git checkout 0123 tests/test_words.py
"""
FIVE = {**BENCH, "instance_id": "caddyserver__caddy-5404", "repo": "caddyserver/caddy", "eval_script": SCRIPT,
        "log_parser": "parse_log_gotest", "eval_type": "pass_and_fail",
        "image": "swebench/sweb.eval.x86_64.caddy:latest"}
GYM = {**BENCH, "instance_id": "getmoto__moto-5752", "repo": "getmoto/moto", "version": "4.0",
       "FAIL_TO_PASS": ["tests/t.py::a"], "PASS_TO_PASS": []}
MULTI = {"org": "cli", "repo": "cli", "number": 10, "state": "closed", "title": "Fix", "body": "It", "lang": "go",
         "base": {"label": "cli:trunk", "ref": "trunk", "sha": SHA}, "fix_patch": PATCH, "test_patch": TEST_PATCH,
         "resolved_issues": [{"number": 9, "title": "Broken", "body": "Badly"}],
         "f2p_tests": {"TestF": {"run": "FAIL", "test": "FAIL", "fix": "PASS"}}, "s2p_tests": {},
         "n2p_tests": {"TestN": {"run": "NONE", "test": "NONE", "fix": "PASS"}},
         "p2p_tests": {"TestP": {"run": "PASS", "test": "PASS", "fix": "PASS"}}}
PRO = {**COMMON, "instance_id": "instance_owner__name-abc-vnan", "repo": "owner/name", "repo_language": "go",
       "requirements": "- be fast", "interface": "func Add", "fail_to_pass": "['TestA', \"Test 'B'\"]",
       "pass_to_pass": "[]", "before_repo_set_cmd": "git reset\ngit checkout abc -- a_test.go",
       "selected_test_files_to_run": "['a_test.go', 'b c_test.go']", "dockerhub_tag": "owner.name-owner__name-abc"}
HUNK = {"descriptor": {"old_range": {"start": 1, "length": 5}, "new_range": {"start": 1, "length": 5}, "section": ""},
        "line_group": {"all_lines": [{"content": "def add(a, b):", "type": "context"},
                                     {"content": "    return a - b", "type": "deleted"},
                                     {"content": "    return a + b", "type": "added"},
                                     {"content": "", "type": "context"}, {"content": "", "type": "context"},
                                     {"content": "def keep(a):", "type": "context"}]}}
DIFF = {"header": {"file": {"path": "src/words.py"}, "misc_line": None}, "minus_file": {"path": "a/src/words.py"},
        "plus_file": {"path": "b/src/words.py"}, "hunks": [HUNK], "old_file_content": "", "new_file_content": ""}
RAN = {"test_file_names": ["test_1.py"], "test_file_codes": ["def test_a():\n    assert add(1, 2) == 3\n"],
       "old_commit_res_stdout": "==== short test summary info ====\nPASSED r2e_tests/test_1.py::T::test_b\n"
                                "FAILED r2e_tests/test_1.py::test_a - assert\n"}
R2E = {"repo_name": "words", "docker_image": "namanjain12/words_final:abc", "commit_hash": SHA,
       "problem_statement": "Read: [ISSUE]\nadd() subtracts.\n[/ISSUE]",
       "expected_output_json": json.dumps({"test_a": "PASSED", "\x1b[1mT.test_b\x1b[0m": "PASSED", "test_c": "FAILED"}),
       "execution_result_content": json.dumps(RAN), "parsed_commit_content": json.dumps({"file_diffs": [
           DIFF, {**DIFF, "header": {"file": {"path": "tests/test_words.py"}}}]})}


def row(one: dict, **changes):
    return read_row({**one, **changes}, "rows:1")


def test_a_rebench_row():
    task = row(REBENCH)
    assert (task.source, task.workdir, task.image_name) == ("swe-rebench-v2", "/Name", REBENCH["image_name"])
    assert task.install_config == {"base_image_name": "go:1.22", "install": ["go mod download"],
                                   "log_parser": "parse_log_gotest", "test_cmd": ["go test -v ./..."]}
    assert task.problem_statement == "add() subtracts." and task.meta == REBENCH["meta"]
    assert row(REBENCH, interface="func Add(a int)").problem_statement.endswith("Interface:\nfunc Add(a int)")
    texts = {name: json.dumps(REBENCH[name]) for name in ("install_config", "FAIL_TO_PASS", "PASS_TO_PASS")}
    assert row(REBENCH, **texts) == task


def test_swe_bench_rows_of_both_kinds(tmp_path):
    task = row(BENCH)
    assert task.fail_to_pass == ("test_a (auth.tests.T)",) and task.pass_to_pass == ("Says what it does.",)
    assert task.image_name == "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"
    assert (task.source, task.workdir) == ("swe-bench", "/testbed")
    assert task.install_config["log_parser"] == "parse_log_django"
    assert task.install_config["test_cmd"].endswith("--settings=test_sqlite --parallel 1 test_words'")
    five = row(FIVE)
    assert five.image_name == FIVE["image"] and five.install_config["log_parser"] == "parse_log_gotest"
    command = five.install_config["test_cmd"]
    assert 'go test -v ./... -run "TestA"' in command and "git" not in command and "EOF" not in command
    (tmp_path / "go").write_text("#!/bin/sh\necho '--- PASS: TestA (0.00s)'; exit 3\n")
    (tmp_path / "go").chmod(0o755)
    runs = command.replace("source /opt/miniconda3/bin/activate", f"PATH={tmp_path}:$PATH").replace("cd /testbed", ":")
    done = subprocess.run(["sh", "-c", runs], capture_output=True, text=True)
    assert done.returncode == 3  # the status is the tests'
    assert done.stderr.count(">>>>> Start Test Output") == 1 and "--- PASS: TestA (0.00s)" in done.stdout


def test_swe_gym_rows():
    task = row(GYM)
    assert task.image_name == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-5752:latest" and task.source == "swe-gym"
    assert "pytest -n0 -rA tests/test_words.py" in task.install_config["test_cmd"]
    data = TEST_PATCH.replace("tests/test_words.py", "test-data/unit/check.test").replace(
        "+    def test_add(self):", "+[case testAdd]")
    mypy = row(GYM, repo="python/mypy", test_patch=data)
    assert "-k testAdd" in mypy.install_config["test_cmd"]


def test_multi_swe_rows_with_maps_and_with_columns():
    task = row(MULTI)
    assert task.instance_id == "cli__cli-10" and task.base_commit == SHA and task.problem_statement == "Broken\n\nBadly"
    assert task.fail_to_pass == ("TestF", "TestN") and task.pass_to_pass == ("TestP",)
    assert task.image_name == "mswebench/cli_m_cli:pr-10" and task.workdir == "/home/cli"
    assert task.hidden == ("/home/fix.patch", "/home/test.patch")
    assert task.install_config == {"test_cmd": "bash /home/run.sh", "log_parser": "multi-swe-go"}
    columns = {f"{kind}_tests": {"name": list(MULTI[f"{kind}_tests"]), "fix": ["PASS"] * len(MULTI[f"{kind}_tests"])}
               for kind in ("f2p", "s2p", "n2p", "p2p")}
    assert row(MULTI, **columns) == task
    gradle = row(MULTI, lang="java", f2p_tests={"ATest > works": {}})
    assert gradle.install_config["log_parser"] == "multi-swe-gradle"


def test_pro_rows_run_their_harnesss_scripts(tmp_path):
    with pytest.raises(ValueError, match="rows:1: instance_.*no row says how its tests run; set data.pro_scripts"):
        row(PRO)
    options = SetOptions(pro_scripts=str(tmp_path))
    with pytest.raises(ValueError, match="No such file or directory; it must hold run_script.sh and parser.py"):
        read_row(PRO, "rows:1", options)
    (tmp_path / PRO["instance_id"]).mkdir()
    (tmp_path / PRO["instance_id"] / "run_script.sh").write_text("echo \"ran $1\"; echo 'it''s' >&2; exit 4\n")
    (tmp_path / PRO["instance_id"] / "parser.py").write_text(
        "import json, sys\nout, err, to = (open(p, m) for p, m in zip(sys.argv[1:], 'rrw'))\n"
        "json.dump({'tests': [{'name': out.read().strip(), 'status': 'PASSED'}]}, to, indent=1)\n")
    task = read_row(PRO, "rows:1", options)
    assert task.fail_to_pass == ("TestA", "Test 'B'") and task.pass_to_pass == () and task.workdir == "/app"
    assert task.image_name == "jefzda/sweap-images:owner.name-owner__name-abc"
    assert task.problem_statement == ("add() subtracts.\n\nRequirements:\n- be fast\n\n"
                                      "New interfaces introduced:\nfunc Add")
    done = subprocess.run(["sh", "-c", task.install_config["test_cmd"]], capture_output=True, text=True)
    from oprd.sandbox.logs import parse_log
    assert done.returncode == 4 and parse_log("swe-bench-pro", done.stdout) == {"ran a_test.go,b c_test.go": "PASSED"}


def test_r2e_rows_have_their_hidden_tests_and_their_fix_as_patches():
    task = row(R2E)
    assert task.instance_id == f"words-{SHA[:12]}" and task.problem_statement == "add() subtracts."
    assert task.fail_to_pass == ("test_a",) and task.pass_to_pass == ("T.test_b",) and task.source == "r2e"
    assert task.patch == PATCH and "/r2e_tests" in task.hidden
    assert [(c.path, c.added) for c in file_changes(task.test_patch.encode())] == [("r2e_tests/test_1.py", True)]


@pytest.mark.parametrize("one", [REBENCH, BENCH, FIVE, GYM, MULTI, R2E])
def test_a_task_written_to_a_file_is_read_back_as_it_was(one):
    task = row(one)
    assert read_row(json.loads(json.dumps(task.to_row())), "again:1") == task == task_from_row(task.to_row(), "x:1")


@pytest.mark.parametrize("one, changes, says", [
    (BENCH, {"FAIL_TO_PASS": "[1, 2"}, "django__django-11099: FAIL_TO_PASS is text, but neither JSON nor"),
    (BENCH, {"repo": "a/b"}, "repo = 'a/b': the row has no eval_script"),
    (BENCH, {"patch": None}, "patch must be text, got nothing"),
    (FIVE, {"eval_type": "fail_only"}, "eval_type is fail_only"),
    (FIVE, {"eval_script": "pytest"}, "eval_script has no lines"),
    (FIVE, {"log_parser": "parse_log_eslint"}, "log_parser = 'parse_log_eslint' must be a known log parser; did you"),
    (MULTI, {"lang": "cobol"}, "cli__cli-10: lang = 'cobol': no parser"),
    (MULTI, {"f2p_tests": {}, "n2p_tests": None}, "FAIL_TO_PASS must be a non-empty list"),
    (REBENCH, {"install_config": {"test_cmd": []}}, "test_cmd = [] must be the test command"),
    (REBENCH, {"FAIL_TO_PASS": []}, "FAIL_TO_PASS must be a non-empty list"),
    (R2E, {"execution_result_content": None}, "execution_result_content and parsed_commit_content must be JSON"),
    ({"name": "x"}, {}, "the row is of no known task set (its fields: name); known: swe-bench-pro"),
])
def test_an_unusable_row_is_named_with_place_id_and_reason(one, changes, says):
    with pytest.raises(ValueError) as problem:
        row(one, **changes)
    assert str(problem.value).startswith("rows:1: ") and says in str(problem.value) and "\n" not in str(problem.value)


def test_a_set_named_in_the_settings_is_not_guessed():
    with pytest.raises(ValueError, match="org must be text"):
        read_row(BENCH, "rows:1", SetOptions(name="multi-swe"))


def test_rows_left_out_are_counted_and_told(tmp_path, caplog):
    path = tmp_path / "tasks.jsonl"
    bad = {**BENCH, "instance_id": "a__b-1", "repo": "a/b"}
    lines = [json.dumps(one) for one in (BENCH, bad, MULTI, BENCH)]
    path.write_text("\n".join([*lines, '{"cut', json.dumps(TASK.to_row())]) + "\n")
    with pytest.raises(ValueError, match=r"tasks.jsonl:2: a__b-1: repo = 'a/b'"):
        read_tasks(path, Data())
    left_out = []
    with caplog.at_level(logging.WARNING):
        tasks = read_tasks(path, Data(strict=False), left_out)
    assert [task.instance_id for task in tasks] == ["django__django-11099", "cli__cli-10", "words-1"]
    assert tasks[2] == TASK
    assert [(Path(one.where).name, one.id) for one in left_out] == [
        ("tasks.jsonl:2", "a__b-1"), ("tasks.jsonl:4", "django__django-11099"), ("tasks.jsonl:5", "")]
    assert "stands already at" in left_out[1].reason and "not valid JSON" in left_out[2].reason
    assert "3 of 6 tasks left out" in caplog.text and "tasks.jsonl:2: a__b-1: repo = 'a/b'" in caplog.text
    path.write_text(lines[1] + "\n")
    with pytest.raises(ValueError, match="tasks.jsonl: no tasks in the file; the first of 1 rows: repo = 'a/b'"):
        read_tasks(path, Data(strict=False))


def test_parquet_rows_are_the_rows_they_were_made_from(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    other = {**REBENCH, "instance_id": "owner__name-8", "install_config": {
        "log_parser": "parse_log_pytest", "test_cmd": ["pytest -rA"], "python_version": "3.9"}}
    parquet.write_table(arrow.Table.from_pylist([REBENCH, other]), tmp_path / "tasks.parquet")
    assert read_tasks(tmp_path / "tasks.parquet", Data()) == [row(REBENCH), row(other)]  # structs are not unified
    (tmp_path / "more.jsonl").write_text(json.dumps(MULTI) + "\n")
    assert len(read_tasks(tmp_path, Data())) == 3  # a folder of both


def test_added_files_are_what_git_adds(tmp_path):
    files = {"a/b.py": "x = 1\n", "c.txt": "no end", "empty": "", "two": "1\n\n2\n"}
    (tmp_path / "patch").write_text(added_files(files))
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "patch"], cwd=tmp_path, check=True)
    assert {name: (tmp_path / name).read_text() for name in files} == files


def test_rows_that_are_errors_come_through():
    found = read_rows([("f:1", ValueError("row: is not valid JSON")), ("f:2", TASK.to_row())], SetOptions(strict=False))
    assert [one.where for one in found.left_out] == ["f:1"] and found.tasks == [TASK]
