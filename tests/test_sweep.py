"""A trainer that dies by SIGKILL leaves nothing behind: neither at once (processes) nor after the next start."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from oprd.sandbox import local
from oprd.sandbox.box import Limits
from oprd.sandbox.local import LocalSandbox
from oprd.sandbox.sweep import FOLDER_PREFIX, _marked, owner_is_dead, run_label, sweep

OWNER = """
import sys
from oprd.sandbox import local
from oprd.sandbox.box import Limits
from oprd.sandbox.sweep import run_label
if sys.argv[2] == "plain":
    local.launcher = lambda: ()
label = run_label(sys.argv[1])
box = local.LocalSandbox({}, Limits(), label)
print(label, flush=True)
box.run("setsid sleep 300 & sleep 300")
"""


@pytest.mark.parametrize("way", ["namespaces", "plain"])
def test_a_killed_owner_is_swept_and_a_live_one_is_not(way, tmp_path, monkeypatch):
    if way == "namespaces" and not local.launcher():
        pytest.skip("this machine allows no namespaces")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    root = Path(__file__).resolve().parents[1]
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), way], stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path)})
    label = owner.stdout.readline().strip()
    deadline = time.monotonic() + 10
    while len(_marked(label + "/")) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    with LocalSandbox({}, Limits(), run_label(tmp_path)) as mine:
        assert sweep() == [] and len(_marked(label + "/")) >= 3  # both owners live: nothing is touched
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
        if way == "namespaces":  # the kernel ends the commands with their trainer, before any sweep
            deadline = time.monotonic() + 5
            while _marked(label + "/") and time.monotonic() < deadline:
                time.sleep(0.02)
            assert _marked(label + "/") == []
        removed = sweep()
        assert f"folder {tmp_path / (FOLDER_PREFIX + label)}" in removed
        assert _marked(label + "/") == [] and not (tmp_path / (FOLDER_PREFIX + label)).exists()
        assert mine.run("echo here").output == "here\n"
    assert list(tmp_path.glob(FOLDER_PREFIX + "*")) == []


def test_a_label_names_its_owner_exactly():
    label = run_label("/some/run")
    digest, pid, start, place = label.split(".")
    assert int(pid) == os.getpid() and not owner_is_dead(label)
    assert owner_is_dead(f"{digest}.{pid}.{int(start) + 1}.{place}")  # the pid is another process's now
    assert owner_is_dead(f"{digest}.{2**22 + 1}.{start}.{place}")
    elsewhere = f"{int(place, 16) ^ 1:08x}"
    assert not owner_is_dead(f"{digest}.{2**22 + 1}.{start}.{elsewhere}")  # another machine's: who knows
    assert not owner_is_dead("not-ours") and not owner_is_dead(label + "x")


def test_folders_with_a_similar_name_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("oprd-data", "oprd-0123456789ab.1", "other"):
        (tmp_path / name).mkdir()
    assert sweep() == [] and len(list(tmp_path.iterdir())) == 3
