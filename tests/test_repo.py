"""The repository an agent sees, and its work as a patch that loses no byte. The oracle is git itself."""

import os
import random
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from oprd.sandbox.box import Limits
from oprd.sandbox.gitstore import one_commit
from oprd.sandbox.opener import opener
from oprd.sandbox.patches import file_changes, unsafe
from oprd.sandbox.repo import apply_patch, extract_patch, prepare
from oprd.sandbox.sweep import run_label
from sandbox_help import FILES, PATCH, TASK, open_local


def tree(box) -> dict[str, tuple[bytes, bool]]:
    """Every file of the work tree but git's own and caches: path -> (bytes, executable)."""
    return {str(p.relative_to(box.host_root)): (p.read_bytes(), bool(p.stat().st_mode & 0o100))
            for p in sorted(box.host_root.rglob("*"))
            if p.is_file() and ".git" not in p.relative_to(box.host_root).parts and "__pycache__" not in p.parts}


def test_the_agent_sees_a_clean_repository_with_one_commit_and_nothing_else_to_read():
    with open_local(TASK) as box:
        assert box.run("git status --porcelain; git log --oneline --all | wc -l").output.strip() == "1"
        assert box.run("git fsck --full --strict --unreachable").code == 0
        assert box.run("git fsck --unreachable 2>&1; git reflog; git tag; git stash list").output == ""
        assert box.run("git commit -q --allow-empty -m mine && git log --oneline | wc -l").output.strip() == "2"


def test_objects_written_without_git_are_the_ones_git_writes(tmp_path):
    files = {"a/x": b"1", "a.b": b"2", "a0": b"3", "a/b/c": b"\0\xff", "empty": b"", "caf\u00e9 1/\u00fc": b"4\r\n",
             "deep/" * 40 + "f": b"6"}
    _, store = one_commit(files)
    for path, data in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    git = ["git", "-C", str(tmp_path), "-c", "core.autocrlf=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    expected = subprocess.run([*git, "write-tree"], check=True, capture_output=True, text=True).stdout.strip()
    assert f"objects/{expected[:2]}/{expected[2:]}" in store
    for path, data in store.items():
        (tmp_path / ".git" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".git" / path).unlink(missing_ok=True)
        (tmp_path / ".git" / path).write_bytes(data)
    assert subprocess.run([*git, "fsck", "--strict"], capture_output=True).returncode == 0
    assert subprocess.run([*git, "status", "--porcelain"], capture_output=True).stdout == b""


def test_one_tree_has_one_commit_id_in_every_run():
    assert one_commit({"a": b"1", "b/c": b"2"})[0] == one_commit({"b/c": b"2", "a": b"1"})[0]
    assert one_commit({"a": b"1"})[0] != one_commit({"a": b"2"})[0]


def test_no_change_is_an_empty_patch_and_one_change_is_this_patch():
    with open_local(TASK) as box:
        assert extract_patch(box) == b""
        box.write("src/words.py", FILES["src/words.py"].replace("a - b", "a + b").encode())
        patch = extract_patch(box).decode()
    assert [line for line in patch.splitlines() if line[:1] in "+-"] == [
        "--- a/src/words.py", "+++ b/src/words.py", "-    return a - b", "+    return a + b"]


WORK = r"""
printf 'new\n' > 'new file'; printf '\0\377\r\n' > bin; : > empty; rm README.md; chmod +x src/words.py
printf 'no end' > noend; printf 'a\r\nb\r\n' > crlf.txt; printf 'caf\351\n' > latin1; mkdir -p d/e; echo 1 > d/e/f
echo ignored > x.log; echo '*.log' > .gitignore; mkdir -p q/__pycache__; echo 1 > q/__pycache__/m.pyc; echo 2 > q/m.py
"""


def test_every_kind_of_change_comes_back_byte_for_byte_in_a_fresh_box():
    with open_local(TASK) as box, open_local(TASK) as fresh:
        assert box.run(WORK).code == 0
        patch = extract_patch(box)
        assert extract_patch(box) == patch  # and looking changes nothing
        assert apply_patch(fresh, patch) == ""
        assert tree(fresh) == tree(box)
        assert tree(fresh)["src/words.py"][1] and "x.log" in tree(fresh) and "README.md" not in tree(fresh)
        assert b"m.pyc" not in patch


@pytest.mark.parametrize("meddling", [
    "git config diff.external /bin/false; git config core.autocrlf true; git config diff.noprefix true",
    "printf '* text eol=crlf -diff\\nsrc/* binary ident\\n' > .gitattributes",
    "git add -A; git commit -qm mine; git checkout -q -b other; git tag base",
    "rm -rf .git; git init -q; git add -A; git commit -qm mine",
    "rm -rf .git; echo gitdir: /nowhere > .git",
    "touch .git/index.lock; rm -f .git/HEAD",
    "printf '[diff]\\nnoprefix = true\\n' > ~/.gitconfig; mkdir -p ~/.config/git; echo '*' > ~/.config/git/ignore",
])
def test_the_agents_git_settings_and_history_do_not_change_its_patch(meddling):
    with open_local(TASK) as box, open_local(TASK) as plain:
        for one in (box, plain):
            one.run("sed -i 's/a - b/a + b/' src/words.py; printf 'x\\r\\n' > crlf")
        expected = extract_patch(plain)
        box.run(meddling)
        patch = extract_patch(box)
        if ".gitattributes" in meddling:
            head, _, rest = patch.partition(b"diff --git a/crlf")
            patch = b"diff --git a/crlf" + rest
        assert patch == expected


def test_a_nested_repository_is_taken_as_plain_files():
    with open_local(TASK) as box, open_local(TASK) as fresh:
        box.run("mkdir lib; cd lib; git init -q; echo 1 > inner; git add -A; git commit -qm x")
        assert apply_patch(fresh, extract_patch(box)) == ""
        assert fresh.read("lib/inner") == b"1\n"


NAMES = ["a.txt", "src/b.py", "src/deep/er/c", "caf\u00e9 \u65e5.md", 'quo"te \\ back', "tab\there", "-dash", " blank ",
         "x/y z", "#hash", "star*[1]?", "Makefile", "src/new\nline", "d.d/e", ".hidden", "UPPER/x"]
CONTENTS = [b"", b"one\n", b"no end", b"a\r\nb\r\n", b"\0\xff\x00bin\n" * 3, b"caf\xe9\n", b"\r\r\n\n", b"x" * 5000,
            b"-- a/x\n++ b/x\n@@ -1 +1 @@\n", b"diff --git a/x b/x\n", b"\xef\xbb\xbfbom\n",
            b"\\ No newline at end of file\n", b"".join(b"line %d\n" % i for i in range(200))]
GIT = ["git add -A", "git add -A; git commit -qm x", "git stash -u -q; git stash pop -q", "git checkout -q -b b2",
       "git gc -q", "git config core.autocrlf true", "printf '* text eol=crlf\\n*.py binary\\n' > .gitattributes",
       "git rm -q --cached a.txt", "printf '*\\n' > .gitignore", "git mv a.txt moved", "rm -rf .git",
       "git config core.fileMode false; git config core.quotePath false",
       "printf '[filter \"f\"]\\nclean = rev\\n' >> .git/config; printf '* filter=f\\n' > .git/info/attributes"]


def meddle(root: Path, rng: random.Random) -> None:
    """One random change of a work tree, made without git."""
    path = root / rng.choice(NAMES)
    if rng.random() < 0.3 and path.is_file():
        path.unlink()
    elif rng.random() < 0.2 and path.is_file():
        path.chmod(path.stat().st_mode ^ 0o111)
    elif rng.random() < 0.15 and path.is_file():
        path.unlink()
        path.symlink_to(rng.choice(["a.txt", "nowhere", "src"]))
    elif rng.random() < 0.15 and path.is_file() and not path.is_symlink():
        path.unlink()
        path.mkdir()  # a folder in a file's place
        (path / "inner").write_bytes(rng.choice(CONTENTS))
    else:
        with suppress(OSError):  # a file in a folder's place, a link to nowhere
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(rng.choice(CONTENTS))


def whole_tree(box) -> dict[str, object]:
    """Every file and link but git's own: bytes and whether it can be run, or where it points."""
    found: dict[str, object] = {}
    for folder, folders, files in os.walk(box.host_root):
        folders[:] = [name for name in folders if name != ".git"]
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]:
            path = Path(folder, name)
            found[str(path.relative_to(box.host_root))] = (
                os.readlink(path) if path.is_symlink() else (path.read_bytes(), bool(path.stat().st_mode & 0o100)))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_a_random_tree_comes_back_whole_whatever_was_done_to_its_git(seed):
    rng = random.Random(seed)
    base = {name: rng.choice(CONTENTS).decode("latin-1") for name in rng.sample(NAMES, 8)}
    task = replace(TASK, files=base)
    with open_local(task) as box, open_local(task) as fresh:
        for _ in range(12):
            meddle(box.host_root, rng)
        box.run("; ".join(rng.sample(GIT, 3)))
        for _ in range(3):
            meddle(box.host_root, rng)
        patch = extract_patch(box)
        assert all(not unsafe(change) for change in file_changes(patch))
        assert apply_patch(fresh, patch) == ""
        assert whole_tree(fresh) == whole_tree(box)
        changed = {c.path for c in file_changes(patch)}
        before = whole_tree(fresh)
        with open_local(task) as again:
            start = whole_tree(again)
        assert changed == {path for path in before.keys() | start.keys() if before.get(path) != start.get(path)}


def test_a_submodule_is_flagged():
    linked = (b"diff --git a/lib b/lib\nindex 1111111..2222222 160000\n--- a/lib\n+++ b/lib\n@@ -1 +1 @@\n"
              b"-Subproject commit 1\n+Subproject commit 2\n")
    added = b"diff --git a/lib b/lib\nnew file mode 160000\nindex 0000000..2222222\n"
    for patch in (linked, added):
        assert "lib is a submodule" in unsafe(file_changes(patch)[0])
    assert not unsafe(file_changes(PATCH.encode())[0])


def test_a_patch_applies_whole_or_not_at_all():
    bad = ("diff --git a/n b/n\nnew file mode 100644\n--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+1\n"
           + PATCH.replace("a - b", "a * b"))
    with open_local(TASK) as box:
        before = tree(box)
        assert "src/words.py" in apply_patch(box, bad.encode()) and tree(box) == before
        assert "corrupt" in apply_patch(box, PATCH.encode()[:-20]) and tree(box) == before
        assert apply_patch(box, PATCH.encode()) == "" and b"a + b" in box.read("src/words.py")


def test_files_left_out_of_a_patch_are_exactly_the_named_ones():
    with open_local(TASK) as box, open_local(TASK) as fresh:
        box.run("echo 1 > 'a[1]'; echo 1 > a1; echo 1 > \"it's\"; echo 1 > 'b*'; echo 1 > bb")
        assert apply_patch(fresh, extract_patch(box), ("a[1]", "it's", "b*")) == ""
        assert set(tree(fresh)) == set(FILES) | {"a1", "bb"}


def test_what_a_task_calls_hidden_is_removed_before_its_tree_is_taken():
    ran = []

    class Image:
        base = None

        def put(self, files, private=False):
            assert private

        def trusted(self, command, seconds=60.0):
            ran.append(command)
            return 0, b"0123\nbuild/\n", b""

    prepare(replace(TASK, files={}, hidden=("/r2e_tests", "/home/fix.patch")), Image())
    assert ran[0].startswith("rm -rf -- /r2e_tests /home/fix.patch\nset -e\n")


def test_names_beyond_ascii_survive():
    task = replace(TASK, files=FILES | {"docs/caf\u00e9.md": "1\n"})
    with open_local(task) as box, open_local(task) as fresh:
        assert box.run("git status --porcelain").output == ""
        box.write("docs/caf\u00e9.md", b"2\n")
        box.write("docs/\u65e5 \"q\".md", b"3\n")
        assert apply_patch(fresh, extract_patch(box)) == "" and tree(fresh) == tree(box)


@pytest.mark.parametrize("kind,says", [("local", "a local sandbox needs the task's files"),
                                      ("docker", "its row has no image_name for a docker sandbox; set sandbox.image")])
def test_a_task_that_a_kind_of_sandbox_cannot_hold_is_refused_by_name(kind, says):
    open_box = opener(kind, Limits(), run_label("nowhere"))
    with pytest.raises(ValueError, match=says):
        open_box(replace(TASK, files={}, image_name=None))
