"""Real bug-fix commits as tasks: the fix scores 1, no patch 0, every time. OPRD_MIRRORS names a folder with the bare
repositories of tests/real_tasks.py; without it these are skipped, because nothing fetched is kept here."""

import os
from pathlib import Path

import pytest

from docker_image import engine
from oprd.sandbox.box import Limits
from oprd.sandbox.check_tasks import check_task
from oprd.sandbox.opener import opener
from oprd.sandbox.sweep import run_label
from real_tasks import REAL, make, toolchains, with_names

CLIENT, WHY_NOT = engine()
MIRRORS = os.environ.get("OPRD_MIRRORS", "")
pytestmark = [pytest.mark.slow, pytest.mark.field, pytest.mark.timeout(1800),
              pytest.mark.skipif(CLIENT is None, reason=WHY_NOT),
              pytest.mark.skipif(not MIRRORS, reason="OPRD_MIRRORS names no folder of git repositories")]
LIMITS = Limits(command_s=300, cpu_s=600, memory_mib=4096, file_mib=1024, processes=512, cpus=2)


@pytest.fixture(scope="module")
def open_box(tmp_path_factory):
    try:
        toolchains(CLIENT)
    except (RuntimeError, OSError) as problem:
        pytest.skip(f"no image of toolchains can be made: {problem}")
    open_box = opener("docker", LIMITS, run_label(tmp_path_factory.mktemp("run")))
    yield open_box
    open_box.close()


@pytest.mark.parametrize("real", REAL, ids=lambda real: f"{real.language}-{real.commit}")
def test_a_real_fix_scores_one_and_none_nought(real, open_box):
    task = with_names(make(CLIENT, real, Path(MIRRORS)), open_box, 300)
    checked = check_task(task, open_box, 2, 300, "real")
    assert (checked.state, checked.reason) == ("ok", "") and checked.gold == (1, 1)
    with open_box(task) as box:  # the image holds the whole history; the box does not
        assert box.run("git log --all --oneline | wc -l").output.strip() == "1"
        assert box.run(f"git cat-file -t {real.commit}").code != 0
