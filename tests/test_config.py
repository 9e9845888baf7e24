"""Settings: file, stage overlay, command line; a name that does not exist is an error naming the nearest."""

import pytest

from oprd.core import config


def resolved(tmp_path, text, *argv, stage="oprd"):
    path = tmp_path / "c.toml"
    path.write_text(text)
    options, given = config.parse(["--stage", stage, "--config", str(path), *argv])
    return config.load(options.config, options.stage, given)


def test_command_line_beats_stage_overlay_beats_file_beats_default(tmp_path):
    text = "[train]\nlr = 1.0\nbatch = 3\nclip = 9.0\n[stages.oprd.train]\nlr = 2.0\nbatch = 4\n[stages.eval.train]\nlr = 7.0\n"
    got = resolved(tmp_path, text, "--train.lr", "3").train
    assert (got.lr, got.batch, got.clip, got.warmup) == (3.0, 4, 9.0, 0.005)
    assert resolved(tmp_path, text, stage="eval").train.lr == 7.0


def test_false_is_a_value_like_any_other(tmp_path):
    assert resolved(tmp_path, "[oprd]\nrouting = false\n").oprd.routing is False
    assert resolved(tmp_path, "[oprd]\nrouting = false\n", "--oprd.routing", "true").oprd.routing is True
    assert resolved(tmp_path, "", "--reminders.global", "false").reminders.global_ is False


def test_lists_are_read_from_the_command_line(tmp_path):
    assert resolved(tmp_path, "", "--oprd.refresh_at", "0.25,0.5").oprd.refresh_at == (0.25, 0.5)
    assert resolved(tmp_path, "", "--reminders.classes", '["R1"]').reminders.classes == ("R1",)


@pytest.mark.parametrize("text,argv,message", [
    ("[opdr]\ntop_k = 3\n", [], r"unknown section \[opdr\]; did you mean oprd\?"),
    ("[oprd]\ntopk = 3\n", [], r"unknown setting oprd.topk; did you mean oprd.top_k\?"),
    ("[stages.opd.train]\nlr = 1.0\n", [], r"\[stages.opd\] is no stage; did you mean oprd\?"),
    ("", ["--train.leaning_rate", "3"], r"unknown setting --train.leaning_rate; did you mean train"),
    ("", ["--oprd.top_k", "0"], r"oprd.top_k = '0': Input should be greater than or equal to 1"),
    ("", ["--oprd.routing", "perhaps"], r"oprd.routing = 'perhaps': Input should be a valid boolean"),
    ("[oprd]\nrefresh_at = [0.5, 1.5]\n", [], r"refresh_at = \[0.5, 1.5\] must lie between 0 and 1"),
    ("[oprd\n", [], r"c.toml: not TOML"),
    ("oprd = 3\n", [], r"\[oprd\] must be a table"),
    ("stages = 3\n", [], r"\[stages\] must hold tables"),
    ("[stages]\noprd = 3\n", [], r"\[stages\] must hold tables"),
    ("", ["--run.seed", "-1"], r"run.seed = '-1'"),
])
def test_a_mistake_is_one_line_that_names_the_place(tmp_path, text, argv, message):
    with pytest.raises(ValueError, match=message) as problem:
        resolved(tmp_path, text, *argv)
    assert "\n" not in str(problem.value)


def test_what_is_written_is_what_is_read(tmp_path):
    first = resolved(tmp_path, "[oprd]\nrefresh_at = [0.1]\n[reminders]\nglobal = false\n[run]\nfolder = 'a \"b'\n")
    assert resolved(tmp_path, config.dump(first)) == first


def test_every_setting_is_described_and_has_an_option():
    for name, field in config.fields().items():
        assert field.description, name
    options, given = config.parse(["--stage", "all", *[part for name in config.fields() for part in (f"--{name}", "1")]])
    assert set(given) == set(config.fields())


def test_changes_names_what_a_stage_overlay_sets(tmp_path):
    text = "[train]\nlr = 1.0\n[stages.oprd.train]\nlr = 2.0\n[stages.oprd.reminders]\nglobal = false\n"
    common, stage = resolved(tmp_path, text, stage="eval"), resolved(tmp_path, text)
    assert config.changes(common, stage) == ["train.lr = 2.0", "reminders.global = False"]
    assert config.changes(stage, stage) == []
