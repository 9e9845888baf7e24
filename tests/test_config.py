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
    ("", ["--oprd.top_k", "0"], r"--oprd.top_k = 0: Input should be greater than or equal to 1"),
    ("", ["--oprd.routing", "perhaps"], r"oprd.routing = 'perhaps': Input should be a valid boolean"),
    ("[oprd]\nrefresh_at = [0.5, 1.5]\n", [], r"refresh_at = \[0.5, 1.5\] must lie between 0 and 1"),
    ("[oprd\n", [], r"c.toml: not TOML"),
    ("oprd = 3\n", [], r"\[oprd\] must be a table"),
    ("stages = 3\n", [], r"\[stages\] must hold tables"),
    ("[stages]\noprd = 3\n", [], r"\[stages\] must hold tables"),
    ("", ["--run.seed", "-1"], r"run.seed = -1: Input should be greater than or equal to 0"),
    ("", ["--run.seed", str(2**32)], r"run.seed = 4294967296: Input should be less than 4294967296"),
    ("", ["--run.seed", "9" * 5000], r"--run.seed = '999.*: Unable to parse"),
    ("", ["--run.threads", "1000000"], r"run.threads = 1000000: Input should be less than or equal to 4096"),
    ("", ["--res"], r"unknown setting --res; did you mean resume\?"),
    ("", ["--lr", "3"], r"unknown setting --lr; did you mean train.lr\?"),
    ("", ["--top-k=3"], r"unknown setting --top-k=3; did you mean oprd.top_k\?"),
    ("", ["nonsense"], r"'nonsense' follows no setting"),
    ("", ["--oprd.refresh_at", "0.2,x"], r"--oprd.refresh_at = '0.2,x': Input should be a valid number"),
    ("", ["--oprd.refresh_at", "{}"], r"--oprd.refresh_at = '{}': Input should be a valid number"),
    ("", ["--train.lr", "nan"], r"--train.lr = nan: Input should be a finite number"),
    ("[train]\nlr = inf\n", [], r"c.toml: train.lr = inf: Input should be a finite number"),
    ("[train]\nbatch = true\n", [], r"c.toml: train.batch = True: Input should be a valid integer"),
    ("[train]\nbatch = '4'\n", [], r"c.toml: train.batch = '4': Input should be a valid integer"),
    ("[train]\nbatch = 4.0\n", [], r"c.toml: train.batch = 4.0: Input should be a valid integer"),
    ("[oprd]\nrouting = 1\n", [], r"c.toml: oprd.routing = 1: Input should be a valid boolean"),
    ("[chat]\nform = 'qwen'\n", [], r"c.toml: chat.form = 'qwen': Input should be 'auto', 'template'"),
    ("[data]\nrows = 2026-01-01\n", [], r"c.toml: data.rows = datetime.* Input should be a valid string"),
    ("[reminders]\nclasses = ['R1', 'R5']\n", [], r"c.toml: reminders.classes\[1\] = 'R5': Input should be 'R1'"),
    ("[stages.oprd.train]\nlr = 'x'\n", [], r"c.toml: \[stages.oprd\] train.lr = 'x': Input should be a valid number"),
    ("[oprd]\nrefresh_at = [2.0]\n", [], r"c.toml: \[oprd\] refresh_at = \[2.0\] must lie"),
    ("lr = 3\n", [], r"c.toml: lr = 3 stands outside a section; did you mean lr under \[train\]\?"),
    ("[stages.oprd]\ntopk = 3\n", [], r"topk = 3 stands outside a section; did you mean top_k under \[stages"),
    ("[stages.all.train]\nlr = 1.0\n", [], r"c.toml: \[stages.all\] would count for no stage"),
])
def test_a_mistake_is_one_line_that_names_the_place(tmp_path, text, argv, message):
    with pytest.raises(ValueError, match=message) as problem:
        resolved(tmp_path, text, *argv)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("data,message", [
    ("[chat]\nsystem = 'Fix it, s'il te plait, é'\n".encode("latin-1"), r"c.toml: not UTF-8 .*save the file as UTF-8"),
    ("[train]\nlr = 1.0\n".encode("utf-16"), r"c.toml: not UTF-8"),
    (b"\0\0", r"c.toml: not TOML"),
])
def test_a_file_in_another_encoding_is_named(tmp_path, data, message):
    (tmp_path / "c.toml").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        config.load(str(tmp_path / "c.toml"), "oprd", {})


def test_a_byte_order_mark_is_passed_over(tmp_path):
    (tmp_path / "c.toml").write_bytes("[train]\nbatch = 3\n".encode("utf-8-sig"))
    assert config.load(str(tmp_path / "c.toml"), "oprd", {}).train.batch == 3


def test_a_whole_number_is_a_number(tmp_path):
    assert resolved(tmp_path, "[train]\nlr = 1\n[oprd]\nrefresh_at = []\n").train.lr == 1.0


@pytest.mark.parametrize("stage", ["eval", "score", "export", "annotate", "match-rules"])
def test_resume_is_refused_where_it_would_do_nothing(stage):
    with pytest.raises(ValueError, match=f"--resume means nothing to --stage {stage}"):
        config.parse(["--stage", stage, "--resume"])


def test_help_says_what_a_choice_may_be(capsys):
    with pytest.raises(SystemExit) as stop:
        config.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "usage: train.py --stage NAME [--config FILE.toml]" in text
    assert "one of bf16, fp32 (default: 'bf16')" in text and "some of R1, R2, R3, R4" in text
    assert "--oprd.routing true|false" in text and "--train.batch N" in text


def test_what_is_written_is_what_is_read(tmp_path):
    first = resolved(tmp_path, "[oprd]\nrefresh_at = [0.1]\n[reminders]\nglobal = false\n[run]\nfolder = 'a \"b'\n")
    assert resolved(tmp_path, config.dump(first)) == first
    odd = resolved(tmp_path, "", "--chat.system", 'tab\t line\n quote" back\\ \x7f \x01 é \U0001f600')
    assert resolved(tmp_path, config.dump(odd)) == odd


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
