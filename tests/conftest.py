"""What several test files share: one finished tiny run of the whole recipe. And what must be set before anything
imports triton: without a GPU its kernels run in its interpreter."""

import os

import pytest

if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

TINY = """
[run]
folder = "{folder}"
threads = 1
[model]
hidden = 32
layers = 2
heads = 2
kv_heads = 1
head_dim = 16
intermediate = 64
[chat]
tools = false
[microswe]
vocabulary = 420
pretrain_texts = 6
coding_tasks = 4
if_tasks = 3
relabels = 2
oprd_tasks = 6
validation_tasks = 3
[data]
max_tokens = 2048
[train]
steps = 2
batch = 4
micro_batch_tokens = 2048
lr = 1e-3
[rollout]
workers = 4
max_turn_tokens = 24
max_turns = 3
[stages.eval.eval]
following = true
"""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A finished tiny run of every stage: its settings file and its folder. Not to be changed (`shutil.copytree`)."""
    import train

    folder = tmp_path_factory.mktemp("tiny")
    config = folder / "tiny.toml"
    config.write_text(TINY.format(folder=folder / "run"))
    assert train.main(["--stage", "all", "--config", str(config)]) == 0
    return config, folder / "run"
