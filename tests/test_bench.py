"""The scripts under bench/ that cannot be run every day still run: in small, and where what they need is missing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCH = Path(__file__).resolve().parent.parent / "bench"


def run(script, *arguments, **environment):
    return subprocess.run([sys.executable, BENCH / script, *arguments], capture_output=True, text=True, timeout=600,
                          env={**os.environ, **environment})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_script_does_nothing_without_one():
    done = run("gpu.py")
    assert done.returncode == 0 and done.stdout.startswith("skipped: no GPU"), done


def test_the_gpu_scripts_sections_run_in_small_on_a_cpu(tmp_path):
    file = tmp_path / "found.json"
    sections = ["triton", "kl", "ce", "attention", "experts", "long"]
    done = run("gpu.py", "--device", "cpu", "--only", *sections, "--out", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert not written["failed"] and all(f"section {name}" in written["found"] for name in sections)
    assert written["found"]["kl N 64 ours"][1] > 0


def test_an_unknown_section_is_a_mistake():
    done = run("gpu.py", "--device", "cpu", "--only", "everything")
    assert done.returncode == 2 and "everything" in done.stderr


def test_the_bench_of_the_heads_gives_every_side_a_time_and_a_peak():
    done = run("heads.py", "64", "32", "9000", "fp32", ROUNDS="1")
    lines = {line[:46].strip(): line for line in done.stdout.splitlines()}
    assert done.returncode == 0, done.stdout + done.stderr
    for side in ("naive torch", "ours", "F.cross_entropy", "ours, gradient in forward", "ours, low memory"):
        assert " x gemm" in lines[side] and "MiB" in lines[side], done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3"])
def test_forked_scoring_costs_the_trunk_and_its_branches(family):
    done = run("teacher.py", "100", "20", family)
    print(done.stdout)
    assert done.returncode == 0 and "within the bars" in done.stdout, done.stdout + done.stderr
