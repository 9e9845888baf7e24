"""What of a patch grading leaves out, language by language, and what makes a patch reach into its test runner."""

from dataclasses import replace

import pytest

from oprd.sandbox.patches import FileChange, added_files, added_lines
from oprd.sandbox.protected import protected, reaches_inside, restore_settings, settings
from tests.sandbox_help import PATCH, TASK, TEST_PATCH


@pytest.mark.parametrize("path, out", [
    ("tests/test_words.py", True), ("tests/test_words.py/x", True), ("tests", True),  # the official one, and overlaps
    ("src/words.py", False), ("src/testing.py", False), ("docs/testing.md", False), ("src/contest.go", False),
    ("pkg/a_test.go", True), ("pkg/a.go", False), ("web/a.test.ts", True), ("web/a.spec.jsx", True),
    ("web/a.ts", False), ("spec/a_spec.rb", True), ("src/main/java/A.java", False),
    ("src/test/java/ATest.java", True), ("lib/MyTest.php", True),
    ("src/a_unittest.cc", True), ("web/__snapshots__/a.snap", True), ("core/latest.py", False),
    ("conftest.py", True), ("a/b/conftest.py", True), ("pytest.ini", True), ("x.pth", True), ("jest.config.ts", True),
    (".mocharc.json", True), ("phpunit.xml.dist", True), (".rspec", True), ("vitest.config.mts", True),
    ("node_modules/jest/index.js", True), (".cargo/config.toml", True), ("vendor/a/b.go", False),
    ("unittest.py", True), ("src/pytest/__init__.py", True), ("tests/pluggy.py", True), ("mypkg/logging.py", False),
    ("tools/run.sh", True), ("tools/other.sh", False),
])
def test_new_files_that_are_left_out(path, out):
    assert bool(protected(TASK, [FileChange(path, added=True)], "bash ./tools/run.sh --all")) == out


@pytest.mark.parametrize("path, out", [
    ("tests/helper.py", True), ("spec/fixtures/a.json", True), ("pkg/testdata/x", True), ("src/words.py", False),
    ("tests_of_time/a.py", False),
])
def test_changed_files_of_test_folders_are_left_out_and_new_ones_there_are_not(path, out):
    assert bool(protected(TASK, [FileChange(path)], "pytest")) == out
    assert not protected(TASK, [FileChange(path, added=True)], "pytest")


def test_commands_inside_a_quoted_script_name_files_too():
    change = [FileChange("bin/test", added=False)]
    assert protected(TASK, change, "bash -c 'set -x\ncd /testbed\nX=1 bin/test -C --verbose'")
    assert protected(replace(TASK, patch=PATCH.replace("src/words.py", "bin/test")), change, "bin/test") == ()


class Files:
    """A box that holds files and runs nothing but `rm`."""

    def __init__(self, **files):
        self.files = files

    def read(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def write(self, path, data):
        self.files[path] = data

    def trusted(self, command):
        self.files.pop(command.split()[-1])


@pytest.mark.parametrize("name, before, after, restored", [
    ("package.json", '"scripts": {"test": "jest"},\n"x": 1', '"scripts": {"test": "true"},\n"x": 1', True),
    ("package.json", '"scripts": {"test": "jest"},\n"x": 1', '"scripts": {"test": "jest"},\n"x": 2', False),
    ("Cargo.toml", "[lib]\nname = 'a'", "[lib]\nname = 'a'\nharness = false", True),
    ("pom.xml", "<a>\n</a>", "<a>\n<skipTests>true</skipTests>\n</a>", True),
    ("Makefile", "all:\n\ttrue", "all:\n\tfalse", False),
    ("pyproject.toml", "[project]\nx = 1\n[tool.pytest.ini_options]\na = 1", "[project]\nx = 2\n"
     "[tool.pytest.ini_options]\na = 1", False),
    ("tox.ini", "[testenv]\ncommands = pytest", "[testenv]\ncommands = true", True),
])
def test_settings_that_projects_share_with_their_runner(name, before, after, restored):
    box = Files(**{name: before.encode()})
    held = settings(TASK, [FileChange(name)], box)
    box.files[name] = after.encode()
    assert restore_settings(box, held) == ((name,) if restored else ())
    assert box.files[name] == (before if restored else after).encode()


def test_settings_the_agent_made_go_again_when_they_speak_of_tests():
    box = Files()
    held = settings(TASK, [FileChange("package.json", added=True)], box)
    box.files["package.json"] = b'{"jest": {}}'
    assert restore_settings(box, held) == ("package.json",) and box.files == {}


@pytest.mark.parametrize("path, line, found", [
    ("a.py", "print('2 passed in 0.01s')", True), ("a.rs", 'println!("test result: ok. 1 passed; 0 failed");', True),
    ("a.go", 'fmt.Println("--- PASS: TestA (0.00s)")', True), ("a.js", "console.log('  3 passing (2ms)')", True),
    ("a.py", "unittest.TestCase.assertEqual = f", True), ("a.py", "import _pytest.runner", True),
    ("a.py", "def pytest_runtest_makereport(item): pass", True), ("a.js", "globalThis.expect = () => any", True),
    ("a.js", "global.it = skip", True),
    ("a.py", "x = unittest.TestCase.maxDiff == 3", False), ("a.py", "passed = values in seen", False),
    ("a.py", "expect = 1", False), ("README.md", "2 passed in 0.01s", False), ("CHANGES.rst", "import _pytest", False),
])
def test_lines_that_reach_into_a_runner(path, line, found):
    patch = added_files({path: f"{line}\n"})
    assert (reaches_inside(TASK, patch.encode(), ()) == f"{path}: {line}") == found
    assert reaches_inside(TASK, patch.encode(), (path,)) == ""  # left out anyway
    about_tests = replace(TASK, patch=patch)
    assert reaches_inside(about_tests, patch.encode(), ()) == ""  # what the task's own fix does is source


def test_added_lines_are_read_by_file():
    assert list(added_lines(PATCH.encode())) == [("src/words.py", "    return a + b")]
    assert [path for path, _ in added_lines((PATCH + TEST_PATCH).encode())] == ["src/words.py"] + [
        "tests/test_words.py"] * 3
