"""Proof that a prepared box does not show its task's solution; it runs before the first turn of any attempt.

A git repository betrays a fix in many ways (later commits and tags, reflogs, stashes, unreachable or packed objects,
alternates, the heads that commands leave behind), and so does an image (Multi-SWE's /home/fix.patch, a second clone, a
tree that holds the fix already). What is looked for is not a list of known leaks but the opposite: the only commit is
the base, every object is reachable from it, no other store on the disk knows the upstream commit, and no patch file
holds a line that only the solution has.

Not looked for: a fixed release of the same project among installed packages.
"""

from __future__ import annotations

import re

from oprd.sandbox.box import Broke, Unusable
from oprd.sandbox.task import Task

NEEDLE = 16  # characters of an added line that make it worth looking for

# Prints a line for each finding. $PRIVATE/gold and /test: the solution and the hidden tests; /needles: lines of theirs.
LOOK = r"""
say() { echo "$*"; }
holds() { [ ! -s "$PRIVATE/needles" ] || ! grep -q -F -f "$PRIVATE/needles" "$1" || say "$1 holds the solution"; }
git for-each-ref --format='%(objectname) %(refname)' | while read -r id ref; do
    [ "$ref" = refs/heads/main ] && [ "$id" = "COMMIT" ] || say "git has the ref $ref"; done
[ "$(git rev-parse HEAD)" = COMMIT ] || say "HEAD is not the base"
n=$(git rev-list --all --reflog | wc -l); [ "$n" -eq 1 ] || say "git has $n commits"
git rev-list --objects HEAD | cut -d' ' -f1 | sort -u > "$PRIVATE/reachable"
git cat-file --batch-all-objects --batch-check='%(objectname)' | sort -u > "$PRIVATE/stored"
n=$(grep -c -v -x -F -f "$PRIVATE/reachable" "$PRIVATE/stored"); [ "$n" -eq 0 ] || say "git has $n unreachable objects"
for name in ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD packed-refs objects/info/alternates logs \
    modules worktrees shallow info/grafts rebase-merge rebase-apply; do
    [ ! -e ".git/$name" ] || say "git has .git/$name"; done
for file in SOLUTION; do [ ! -e "$file" ] || say "$file exists"; done
applies() { GIT_DIR=$PRIVATE/none git apply --check --whitespace=nowarn "$@" "$PRIVATE/$name" 2>/dev/null; }
for name in gold test; do
    [ -s "$PRIVATE/$name" ] && applies -R && ! applies && say "the tree already holds the $name patch"; done
find / -xdev \( -path /proc -o -path /sys -o -path "$PWD/.git" -o -path "$PRIVATE" \) -prune -o \
    \( -name .git -o -name packed-refs -o -name '*.bundle' -o -name '*.patch' -o -name '*.diff' \) -print |
while read -r path; do
    case $path in
        *.bundle) git bundle list-heads "$path" >/dev/null 2>&1 && say "$path is a git bundle";;
        *.patch|*.diff) holds "$path";;
        *) store=${path%/packed-refs}
            [ -z "UPSTREAM" ] || ! git --git-dir="$store" cat-file -e "UPSTREAM" 2>/dev/null ||
                say "$store knows the upstream commit"
            [ "${store#"$PWD"/}" = "$store" ] || [ -n "${path%%*/.git}" ] || say "$path is a second repository";;
    esac; done
find / /home /tmp /root /workspace /opt /mnt /srv -xdev -maxdepth 1 -type f -size -8192k 2>/dev/null |
while read -r path; do holds "$path"; done
rm -f "$PRIVATE/gold" "$PRIVATE/test" "$PRIVATE/needles" "$PRIVATE/reachable" "$PRIVATE/stored"
"""


def check_sealed(task: Task, box, seconds: float = 300.0) -> None:
    """Raises Unusable naming what the agent could find; Broke when the box cannot be looked through."""
    from oprd.sandbox.repo import SOLUTION_FILES

    needles = needles_of(task.patch) + needles_of(task.test_patch)
    box.put({"gold": task.patch.encode(), "test": task.test_patch.encode(),
             "needles": "".join(line + "\n" for line in needles).encode()}, private=True)
    upstream = task.base_commit if re.fullmatch("[0-9a-f]{40}", task.base_commit) else ""
    script = (LOOK.replace("COMMIT", box.base.commit).replace("UPSTREAM", upstream)
              .replace("SOLUTION", " ".join((*SOLUTION_FILES, *task.hidden))))
    code, out, err = box.trusted(script, seconds)
    if code:
        raise Broke(f"{task.instance_id}: the box cannot be looked through: {err[-300:]!r}")
    found = sorted(set(out.decode("utf-8", "replace").splitlines()))
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise Unusable(f"{task.instance_id}: an agent could find the solution: {'; '.join(found[:3])}{more}")


def needles_of(patch: str) -> list[str]:
    """Up to eight added lines of a patch that are long enough to be nobody else's, as a patch file spells them."""
    lines = {line.rstrip("\r") for line in patch.split("\n")
             if line.startswith("+") and not line.startswith("+++ ") and len(line[1:].strip()) >= NEEDLE}
    return sorted(lines, key=lambda line: (-len(line), line))[:8]
