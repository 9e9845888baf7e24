"""What follows from the settings before anything runs."""

import numpy as np
import pytest

from oprd.core import plan
from oprd.core.settings import Config
from oprd.core.model import ModelConfig
from oprd.core.types import Example, Row

MODEL = ModelConfig(vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
                    num_key_value_heads=1, head_dim=8, tie_word_embeddings=True)


def config(**sections) -> Config:
    return Config.model_validate(sections)


def test_the_teacher_is_refreshed_at_a_fifth_two_three_and_four_fifths_of_training():
    assert plan.refresh_steps(config(), 375) == {75, 150, 225, 300}


def test_a_refresh_that_would_do_nothing_is_none():
    assert plan.refresh_steps(config(), 2) == {1}  # rounded: 0, 1, 1, 2; at 0 both are equal, 2 never comes
    assert plan.refresh_steps(config(oprd={"refresh": "every", "refresh_every": 3}), 9) == {3, 6}
    assert plan.refresh_steps(config(oprd={"refresh": "frozen"}), 9) == frozenset()


def test_steps_follow_from_epochs_unless_given():
    assert plan.total_steps(config(train={"batch": 8, "epochs": 1.5}), 20) == 4  # 30 rows in batches of 8
    assert plan.total_steps(config(train={"batch": 8, "steps": 7}), 20) == 7


@pytest.mark.parametrize("sections,message", [
    ({"train": {"batch": 6}, "oprd": {"attempts_per_task": 4}}, "train.batch = 6 .*oprd.attempts_per_task = 4"),
    ({"oprd": {"top_k": 51}}, "oprd.top_k = 51 must not exceed the model's vocabulary of 50"),
    ({"oprd": {"top_k": 9}, "train": {"micro_batch_tokens": 512}}, "max_context_tokens = 1024 .*batch_tokens = 512"),
])
def test_what_an_oprd_run_would_fail_with_later_is_said_before(sections, message):
    with pytest.raises(ValueError, match=message):
        plan.check_oprd(config(**sections), MODEL)
    plan.check_oprd(config(oprd={"top_k": 51, "support": "full"}), MODEL)


@pytest.mark.parametrize("sizes,message", [
    ({"heads": 3, "kv_heads": 2}, "num_attention_heads = 3 must be a multiple of num_key_value_heads = 2 .model.heads"),
    ({"head_dim": 7}, "head_dim = 7 must be even"),
])
def test_sizes_of_a_random_model_that_do_not_fit_are_named_before_anything_is_recorded(sizes, message):
    with pytest.raises(ValueError, match=message):
        plan.random_sizes(config(model=sizes), 420)


def test_a_start_and_a_run_folder_that_are_files_are_told_from_missing_ones(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileNotFoundError, match="file is no folder; run --stage if-sft first, or set model.path"):
        plan.starting_point(config(model={"path": str(tmp_path / "file")}), "oprd")
    with pytest.raises(NotADirectoryError, match="data cannot be made: this is no folder: .*file"):
        plan.data_file(config(run={"folder": str(tmp_path / "file")}), "oprd")


def test_the_recipe_refuses_what_its_last_stage_would_fail_with():
    with pytest.raises(ValueError, match="oprd.top_k = 500 must not exceed microswe.vocabulary = 420"):
        plan.check_recipe(config(microswe={"vocabulary": 420}), config(oprd={"top_k": 500}))


def test_a_row_that_fits_no_micro_batch_is_named():
    rows = [Example(Row(np.arange(n), np.arange(1, n)), {"nll": np.ones(n - 1)}, source=f"rows.jsonl:{n}")
            for n in (16, 17)]
    plan.check_fits(config(train={"micro_batch_tokens": 17}), rows)
    with pytest.raises(ValueError, match="rows.jsonl:17: 17 tokens .*micro_batch_tokens = 16"):
        plan.check_fits(config(train={"micro_batch_tokens": 16}), rows)


@pytest.mark.parametrize("section,field", [("model", "path"), ("data", "rows"), ("data", "tasks")])
def test_the_recipe_refuses_a_setting_that_would_make_all_stages_the_same(section, field):
    with pytest.raises(ValueError, match=f"{section}.{field} = 'x' would count for every stage"):
        plan.check_recipe(config(**{section: {field: "x"}}), config())
