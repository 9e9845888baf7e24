"""An image whose repository betrays the fix is refused before the first turn; a prepared one betrays nothing."""

from dataclasses import replace

import pytest

from docker_image import derived, engine
from oprd.sandbox.box import Limits, Unusable
from oprd.sandbox.sweep import run_label
from oprd.sandbox.task import Task
from sandbox_help import FILES, PATCH, TEST_PATCH

CLIENT, WHY_NOT = engine()
pytestmark = pytest.mark.skipif(CLIENT is None, reason=WHY_NOT)
LABEL = run_label(__file__)

if CLIENT is not None:
    from oprd.sandbox.docker_box import DockerSandbox
    from oprd.sandbox.repo import extract_patch, prepare
    from oprd.sandbox.sealed import check_sealed, needles_of

# A repository as it is when it was cloned with its future and then set back: the fix is in later commits, a tag, a
# reflog, a stash, a pack, a remote's branch, a bundle and two patch files; a dependency is ignored.
SCRIPT = "git init -q .; git config user.name u; git config user.email u@x; mkdir src tests\n" + "".join(
    f"cat > {path} <<'EOF'\n{text}EOF\n" for path, text in FILES.items()) + f"""
printf 'node_modules/\\n*.log\\n' > .gitignore; echo kept > kept.log; git add -f kept.log
mkdir -p node_modules/dep; echo 1 > node_modules/dep/i.js
printf '*.txt text eol=crlf\\n' > .gitattributes; printf 'one\\r\\ntwo\\r\\n' > crlf.txt
git add .; git commit -qm base; git rev-parse HEAD > /base
cat > /home/fix.patch <<'EOF'
{PATCH}EOF
cat > /home/test.patch <<'EOF'
{TEST_PATCH}EOF
git apply --whitespace=nowarn /home/fix.patch; echo FIXED-SECRET > src/secret.py; git add .; git commit -qm 'the fix'
git rev-parse HEAD > /fix; git tag v2.0; git update-ref refs/remotes/origin/main HEAD
echo stashed > README.md; git stash -q; git gc -q; git reset -q --hard "$(cat /base)"
"""


@pytest.fixture(scope="module")
def tag():
    return derived(CLIENT, "leaky", f"mkdir -p /home; {SCRIPT}")


@pytest.fixture(scope="module")
def task(tag):
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
        base = box.trusted("cat /base")[1].decode().strip()
    return Task("words-1", "micro/words", base, "add() subtracts.", PATCH, TEST_PATCH, ("t",), (), {}, tag)


@pytest.fixture
def box(tag, task):
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
        prepare(task, box)
        yield box


def test_a_prepared_repository_has_one_commit_and_no_way_to_the_fix(box, task):
    check_sealed(task, box)
    fix = box.trusted("cat /fix")[1].decode().strip()
    for look in ("git log --all --oneline | wc -l", "git rev-list --all --reflog | wc -l"):
        assert box.run(look).output.strip() == "1", look
    for look in ("git tag", "git stash list", "git reflog", "git branch -r", "git remote",
                 "git fsck --unreachable --no-reflogs", "git fsck --lost-found",
                 f"git cat-file -t {fix} 2>/dev/null", "ls /home", "ls .git | grep _HEAD",
                 "grep -r FIXED-SECRET . /home 2>/dev/null", "git status --porcelain"):
        assert box.run(look).output == "", look
    assert box.run("git log -1 --format=%cI").output.startswith("2023-11-14T")


def test_what_the_repository_ignores_is_in_no_commit_and_no_patch_but_new_ignored_files_are(box):
    assert box.run("git ls-files").output.split() == [
        ".gitattributes", ".gitignore", "README.md", "crlf.txt", "kept.log", "src/words.py", "tests/test_words.py"]
    assert extract_patch(box) == b""
    box.run("echo 2 > node_modules/dep/i.js; echo new > fresh.log; printf 'three\\r\\n' >> crlf.txt; rm kept.log; "
            "mkdir -p src/__pycache__; echo 1 > src/__pycache__/x.pyc")
    patch = extract_patch(box)
    assert b"node_modules" not in patch and b"__pycache__" not in patch
    assert b"b/fresh.log" in patch and b"deleted file" in patch and b"+three\r\n" in patch and b"-one" not in patch


LEAKS = {
    "git tag later": "git has the ref refs/tags/later",
    "git commit -q --allow-empty -m next; git reset -q --hard HEAD~1": "ORIG_HEAD",
    "echo secret | git hash-object -w --stdin": "1 unreachable object",
    "git commit -q --allow-empty -m next": "HEAD is not the base",
    "git checkout -q -b other": "the ref refs/heads/other",
    "git pack-refs --all": "packed-refs",
    "mkdir -p .git/objects/info; echo /x/objects > .git/objects/info/alternates": "alternates",
    "mkdir sub; git -C sub init -q": "sub/.git is a second repository",
    "mkdir -p /home; echo x > /home/fix.patch": "/home/fix.patch exists",
    "mkdir -p /opt/old; cp -r .git /opt/old/.git": "/opt/old/.git knows the upstream commit",
    "sed -i 's/return a - b/return a + b/' src/words.py": "the tree already holds the gold patch",
}


@pytest.mark.parametrize("leak", LEAKS)
def test_every_leak_is_named_and_refused(leak, box, task):
    if "/opt/old" in leak:
        task = replace(task, base_commit=box.base.commit)
    ran = box.run(leak)
    assert ran.code == 0, ran.output
    with pytest.raises(Unusable, match=f"words-1: an agent could find the solution: .*{LEAKS[leak]}"):
        check_sealed(task, box)


def test_a_patch_file_anywhere_that_holds_the_solution_is_found(box, task):
    long = PATCH.replace("+    return a + b", "+    return sum_of_both_numbers(a, b)")
    task = replace(task, patch=long)
    assert needles_of(long) == ["+    return sum_of_both_numbers(a, b)"]
    box.run("mkdir -p /var/x; printf 'x\\n+    return sum_of_both_numbers(a, b)\\n' > /var/x/y.diff")
    with pytest.raises(Unusable, match="/var/x/y.diff holds the solution"):
        check_sealed(task, box)


def test_the_opener_refuses_the_task(tag, task):
    from oprd.sandbox.opener import opener

    open_box = opener("docker", Limits(), LABEL)
    try:
        with open_box(task) as box:
            assert box.run("git log --oneline | wc -l").output.strip() == "1"
        leaky = derived(CLIENT, "clone", f"mkdir -p /home; {SCRIPT}\nmkdir -p /opt; cp -a /repo /opt/upstream")
        with pytest.raises(Unusable, match="/opt/upstream/.git knows the upstream commit"):
            open_box(replace(task, image_name=leaky, base_commit=_base_of(leaky)))
        assert not [c for c in CLIENT.containers.list(all=True) if c.labels.get("oprd.run") == LABEL]
    finally:
        open_box.close()


def _base_of(tag):
    with DockerSandbox(tag, Limits(), LABEL, CLIENT) as box:
        return box.trusted("cat /base")[1].decode().strip()
