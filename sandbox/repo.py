"""A task's repository in a sandbox, and the agent's work as a patch against its base commit.

The base is one commit without any history (an agent cannot look up the fix). What the agent does with the `.git`
it sees does not matter: the patch is made with our own git data ($PRIVATE/git, from the same base), our own index
and a neutral configuration, and keeps every byte: untracked, deleted, binary, empty, mode-changed and CRLF files.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Mapping

from oprd.sandbox.box import Broke
from oprd.sandbox.gitstore import one_commit
from oprd.sandbox.task import Task

# Where images of the public sets keep the solution (Multi-SWE); an agent must not find it, a grader does not need it.
SOLUTION_FILES = ("/home/fix.patch", "/home/test.patch")
DATE = "'1700000000 +0000'"  # an agent's view has no clock
MAX_PATCH = 4 * 2**20  # bytes; a larger one is no source change and is refused by verify()

# Overrides .gitattributes of the work tree: no line-end conversion, no keyword or filter, text or binary by content.
ATTRIBUTES = b"* -text !eol !diff !filter !ident !working-tree-encoding\n"
CACHES = b"__pycache__/\n.pytest_cache/\n"  # no work of the agent's, wherever they lie
PRIVATE_CONFIG = (b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
                  b"\tattributesFile = /dev/null\n\texcludesFile = /dev/null\n\tfsync = none\n\tsafecrlf = false\n")

# The tree as the image has it. What the image's own repository ignores (installed packages, built files) is in no
# commit and in no patch, at just those paths. The commit has a fixed date. An old git has no `init -b`.
INITIALISE = f"""set -e
rm -f {" ".join(SOLUTION_FILES)}
: > "$PRIVATE/ignored"; known=; [ -e .git ] && git rev-parse -q --verify HEAD >&2 && known=1
[ -z "$known" ] || git ls-files -z -c -i --exclude-standard > "$PRIVATE/ignored"
find . -name .git -prune -exec rm -rf {{}} +
git init -q --template= . >&2; git symbolic-ref HEAD refs/heads/main; mkdir -p .git/info
cp "$PRIVATE/attributes" .git/info/attributes
git config user.name Developer; git config user.email developer@example.invalid; git config gc.auto 0
if [ "$known" ]; then git add -A . >&2; git update-index --add --remove -z --stdin < "$PRIVATE/ignored" >&2
else git add -A -f . >&2; fi
GIT_AUTHOR_DATE={DATE} GIT_COMMITTER_DATE={DATE} git commit -q --no-verify --allow-empty -m Base >&2
rm -rf .git/COMMIT_EDITMSG .git/logs "$PRIVATE/git"; cp -a .git "$PRIVATE/git"; git rev-parse HEAD
git ls-files -z -o -i --exclude-standard --directory | tr '\\000' '\\n' | sed 's/[][*?\\]/\\\\&/g; s/^/\\//'"""

# A nested .git would turn its folder into an unreadable link, so it goes. No .gitignore counts, only left_out.
EXTRACT = """find . -mindepth 2 -name .git -prune -exec rm -rf {{}} + &&
export GIT_DIR="$PRIVATE/git" GIT_WORK_TREE=. &&
git add -u -- . && git ls-files -z -o --exclude-from="$PRIVATE/left_out" > "$PRIVATE/new" &&
git update-index --add -z --stdin < "$PRIVATE/new" &&
git diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \\
    --src-prefix=a/ --dst-prefix=b/ {commit} --"""

# The whole work tree, ignored files too, in an index of its own; nested .git folders count as links.
STATE = """export GIT_DIR="$PRIVATE/git" GIT_WORK_TREE=. GIT_INDEX_FILE="$PRIVATE/git/state" &&
git add -A -f -- . ':(exclude,glob)**/__pycache__/**' ':(exclude,glob)**/.pytest_cache/**' && git write-tree && pwd"""

APPLY = """export GIT_CEILING_DIRECTORIES="$(dirname "$PWD")" GIT_DIR="$PRIVATE/none"
git apply --whitespace=nowarn {options} "$PRIVATE/{name}" """


@dataclass(frozen=True)
class Base:
    """A box's recorded base: commit id, and the private git data that extract_patch() puts down when first needed."""

    commit: str
    private: Mapping[str, bytes]


def prepare(task: Task, box) -> None:
    """Bring a new box to the task's base: files (MicroSWE) or the image's own tree, and a `.git` with one commit.

    Records the base in `box.base`. Raises Broke.
    """
    if task.files:
        tree, box.base = _base(json.dumps(dict(task.files), sort_keys=True))
        box.put(tree)
        return
    box.put({"attributes": ATTRIBUTES}, private=True)
    hide = f"rm -rf -- {' '.join(task.hidden)}\n" if task.hidden else ""
    code, out, err = box.trusted(hide + INITIALISE, 600)
    if code:
        raise Broke(f"{task.instance_id}: git cannot make the base commit: {_text(err)}")
    commit, _, ignored = out.partition(b"\n")
    box.base = Base(commit.decode(), {"git/info/attributes": ATTRIBUTES, "git/config": PRIVATE_CONFIG,
                                      "left_out": CACHES + ignored})


@functools.lru_cache(maxsize=64)
def _base(files: str) -> tuple[Mapping[str, bytes], Base]:
    """The files of the tree with its .git, and the base; cached, because a task is opened many times."""
    tree = {path: text.encode() for path, text in json.loads(files).items()}
    commit, store = one_commit(tree)
    private = store | {"config": PRIVATE_CONFIG, "info/attributes": ATTRIBUTES}
    return (tree | {f".git/{path}": data for path, data in store.items()},
            Base(commit, {f"git/{path}": data for path, data in private.items()} | {"left_out": CACHES}))


def extract_patch(box) -> bytes:
    """The work tree against the base commit, as a git patch; b"" when nothing changed. Raises Broke."""
    assert box.base, "prepare() comes first"
    box.put(box.base.private, private=True)
    code, out, err = box.trusted(EXTRACT.format(commit=box.base.commit))
    if code:
        raise Broke(f"git cannot make the patch: {_text(err)}")
    return out


def state_of(box) -> str:
    """What a later command would find: the id of the work tree (git's hash of every path, mode and byte, caches of
    Python apart) and the working directory relative to the root, which no command can leave changed. Raises Broke."""
    assert box.base, "prepare() comes first"
    box.put(box.base.private, private=True)
    code, out, err = box.trusted(STATE)
    if code:
        raise Broke(f"git cannot hash the work tree: {_text(err)}")
    tree, _, folder = out.decode("utf-8", "surrogateescape").strip().partition("\n")
    return f"{tree} {folder.rsplit('/', 1)[-1]}"


def apply_patch(box, patch: bytes, leave_out: tuple[str, ...] = ()) -> str:
    """Apply a patch whole or not at all, without the files named in `leave_out`. Returns "" or git's complaint."""
    options = " ".join(f"--exclude={_quoted(path)}" for path in leave_out)
    box.put({"patch": patch}, private=True)
    code, _, err = box.trusted(APPLY.format(options=options, name="patch"))
    return "" if code == 0 else _text(err) or f"git apply ended with status {code}"


def _quoted(path: str) -> str:
    """A path as a literal pattern, safe in a shell word."""
    literal = "".join(f"\\{c}" if c in "*?[\\" else c for c in path)
    return "'" + literal.replace("'", "'\\''") + "'"


def _text(err: bytes) -> str:
    return err.decode("utf-8", "replace").strip()[:2000]
