"""Real repositories with real bug-fix commits, each made into an image and a task row as the public sets have them.

    python tests/real_tasks.py MIRRORS OUTPUT.jsonl

MIRRORS holds bare git repositories as MIRRORS/<owner>+<name>/repo; nothing of them is kept here. The toolchains come
from Debian packages into one image (debootstrap, as root), the repository with all of its history, fix included, into
an image on top. FAIL_TO_PASS and PASS_TO_PASS are what the tests did before and after the fix.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from oprd.sandbox.logs import PASSED  # noqa: E402
from oprd.sandbox.task import Task  # noqa: E402
from oprd.sandbox.verify import verify, without_patch  # noqa: E402

TOOLCHAINS = "oprd-toolchains:1"
PACKAGES = ("git python3 python3-pytest golang-go nodejs mocha cargo rustc librust-serde-dev procps").split()
CARGO = '[source.crates-io]\nreplace-with = "debian"\n[source.debian]\ndirectory = "/usr/share/cargo/registry"\n'


@dataclass(frozen=True)
class Real:
    """A fix: repository, commit, the paths that are tests, how they are run and read."""

    repo: str
    commit: str
    tests: tuple[str, ...]
    language: str
    test_cmd: str
    log_parser: str


PYTEST = "python3 -m pytest -rA -p no:cacheprovider"
MOCHA = "mocha --reporter tap --check-leaks --ui qunit test/"
REAL = (
    Real("mahmoud/boltons", "1e61524", ("tests",), "python", f"{PYTEST} tests/test_strutils.py", "parse_log_pytest"),
    Real("mahmoud/boltons", "6cac49c", ("tests",), "python", f"{PYTEST} tests/test_dictutils.py", "parse_log_pytest"),
    Real("Masterminds/semver", "b1bb761", ("constraints_test.go",), "go", "go test -v ./...", "parse_log_gotest"),
    Real("Masterminds/semver", "9f3b646", ("constraints_test.go",), "go", "go test -v ./...", "parse_log_gotest"),
    Real("jshttp/cookie", "042073f", ("test",), "js", MOCHA, "parse_log_tap"),
    Real("jshttp/cookie", "e248786", ("test",), "js", MOCHA, "parse_log_tap"),
    Real("dtolnay/semver", "b2d8468", ("tests",), "rust", "cargo test --offline --no-fail-fast", "parse_log_cargo"),
    Real("dtolnay/semver", "af79743", ("tests",), "rust", "cargo test --offline --no-fail-fast", "parse_log_cargo"),
)


def toolchains(client) -> str:
    """The image with the languages' tools; made when the engine has none. Raises RuntimeError where it cannot be."""
    if any(TOOLCHAINS in image.tags for image in client.images.list()):
        return TOOLCHAINS
    if os.geteuid():
        raise RuntimeError("debootstrap needs root")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        subprocess.run(["debootstrap", "--variant=minbase", "--include=ca-certificates", "stable", root], check=True)
        (root / "etc/resolv.conf").write_bytes(Path("/etc/resolv.conf").read_bytes())
        subprocess.run(["chroot", root, "apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES],
                       check=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        archive = Path(folder) / "root.tar"
        subprocess.run(["tar", "-C", root, "--exclude=./proc/*", "--exclude=./sys/*", "-cf", archive, "."], check=True)
        client.api.import_image(str(archive), repository=TOOLCHAINS.split(":")[0], tag=TOOLCHAINS.split(":")[1])
    return TOOLCHAINS


def git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True).stdout


def make(client, real: Real, mirrors: Path) -> Task:
    """The task with its image; FAIL_TO_PASS is not known yet."""
    mirror = mirrors / real.repo.replace("/", "+") / "repo"
    commit = git(mirror, "rev-parse", real.commit).decode().strip()
    base = git(mirror, "rev-parse", f"{commit}^").decode().strip()
    name = real.repo.split("/")[1]
    tag = f"oprd-real-{name}".lower(), commit[:10]
    patch = git(mirror, "diff", "--binary", base, commit, "--", ".", *(f":(exclude){path}" for path in real.tests))
    test_patch = git(mirror, "diff", "--binary", base, commit, "--", *real.tests)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / name
        git(mirror, "clone", "-q", "--no-hardlinks", str(mirror), str(tree))
        git(tree, "reset", "-q", "--hard", base)
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(tree, name, filter=_by_root)
            cargo = tarfile.TarInfo("root/.cargo/config")
            cargo.size = len(CARGO)
            tar.addfile(cargo, io.BytesIO(CARGO.encode()))
    container = client.containers.create(toolchains(client), ["true"])
    try:
        container.put_archive("/", archive.getvalue())
        container.commit(*tag, conf={"WorkingDir": f"/{name}", "Env": [
            "PATH=/usr/local/bin:/usr/bin:/bin", "HOME=/root", "NODE_PATH=/usr/share/nodejs", "GOFLAGS=-mod=mod"]})
    finally:
        container.remove(force=True)
    return Task(f"{real.repo.replace('/', '__')}-{commit[:7]}", real.repo, base,
                git(mirror, "log", "-1", "--format=%B", commit).decode(), patch.decode(), test_patch.decode(),
                ("?",), (),
                {"test_cmd": real.test_cmd, "log_parser": real.log_parser}, ":".join(tag))


def _by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry


def with_names(task: Task, open_box: Callable, seconds: float) -> Task:
    """FAIL_TO_PASS and PASS_TO_PASS by running the tests before and after the fix."""
    after = verify(task, task.patch.encode(), open_box, seconds)
    before = without_patch(task, open_box, seconds)
    passed = {test for test, status in after.status.items() if status == PASSED}
    kept = {test for test in passed if before.status.get(test) == PASSED}
    if not passed - kept:
        raise AssertionError(f"{task.instance_id}: no test is mended by the fix ({after.reason}): {after.log[-2000:]}")
    return replace(task, fail_to_pass=tuple(sorted(passed - kept)), pass_to_pass=tuple(sorted(kept)))


def main(mirrors: str, output: str) -> None:
    import docker

    from oprd.sandbox.box import Limits
    from oprd.sandbox.opener import opener
    from oprd.sandbox.sweep import run_label

    limits = Limits(command_s=300, cpu_s=600, memory_mib=4096, file_mib=1024, processes=512, cpus=2)
    client, open_box = docker.from_env(), opener("docker", limits, run_label(output))
    try:
        with open(output, "x", encoding="utf-8") as out:
            for real in REAL:
                task = with_names(make(client, real, Path(mirrors)), open_box, 300)
                mend, keep = len(task.fail_to_pass), len(task.pass_to_pass)
                print(f"{task.instance_id}: {mend} to mend, {keep} to keep", flush=True)
                out.write(json.dumps(task.to_row()) + "\n")
    finally:
        open_box.close()
        client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
