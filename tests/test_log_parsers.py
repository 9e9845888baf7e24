"""Parsers of every runner, on real outputs (tests/logs) and against the parsers others wrote (the swebench package)."""

import importlib
import importlib.util
import json
import random
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from oprd.sandbox.log_lines import clean, settled
from oprd.sandbox.logs import NAMED, opinion, parse_log, timeless
from oprd.sandbox.results import Lookup, read_results

LOGS = Path(__file__).parent / "logs"
INF = float("inf")
P, F, E, S = "PASSED", "FAILED", "ERROR", "SKIPPED"
MATH = "jst/sum.test.js > math"
JEST = {f"{MATH} > adds 1 + 1": P, f"{MATH} > slow one (30 ms)": P, f"{MATH} > pair 1 2": F, f"{MATH} > pair 3 3": P,
        f"{MATH} > nested group > fails": F, f"{MATH} > nested group > skipped here": S,
        f"{MATH} > nested group > todo later": S, "jst/sum.test.js > other > adds 1 + 1": P}
CARGO = {"tests::ignored": S, "tests::ignored_reason": S, "tests::fails": F, "tests::nested::deep": P, "tests::ok": P,
         "tests::wrong_panic": F, "tests::panics": P}
GO = {"TestAdd": F, "TestAdd/sum": F, "TestAdd/file": F}
RUNS = [  # recording, parser, every status, passes of the runner's summary
    ("go_test_v_fail", "go", {**GO, "TestOK": P}, INF),
    ("go_test_json_fail", "go-json", {f"example.com/gp/failtest.{t}": s for t, s in {**GO, "TestOK": P}.items()}, INF),
    ("go_test_all_mixed", "go", {**GO, "example.com/gp/undef": E, "example.com/gp/brokentest": E}, INF),
    ("go_test_example_fail", "go", {"Example": F}, INF), ("go_test_race", "go", {"TestRace": F}, INF),
    ("go_test_no_tests_to_run", "go", {}, INF),
    ("cargo_test", "cargo", CARGO, 3),
    ("cargo_test_no_fail_fast", "cargo", {**CARGO, "ok": P, "src/lib.rs - add (line 3)": P}, 5),
    ("cargo_filter_none", "cargo", {}, 0),
    ("jest_default", "jest", JEST, 4), ("jest_verbose", "jest", JEST, 4),
    ("jest_json", "jest-json", {test.removeprefix("jst/sum.test.js > "): s for test, s in JEST.items()}, 4),
    ("mocha_spec", "mocha", {
        "Array > throws": F, "Array > #indexOf() > returns -1 when absent": P, "Array > #indexOf() > fails here": F,
        "Array > #indexOf() > pending without body": S, "Array > #indexOf() > is slow": P,
        'hooks > "before all" hook for "never runs"': F}, 2),
    ("mocha_json", "mocha-json", {
        "Array throws": F, "Array #indexOf() returns -1 when absent": P, "Array #indexOf() fails here": F,
        "Array #indexOf() pending without body": S, "Array #indexOf() is slow": P,
        'hooks "before all" hook for "never runs"': F}, 2),
    ("mocha_tap", "tap", {
        "Array throws": F, "Array indexOf() returns -1 when absent": P, "Array indexOf() fails here": F,
        "Array indexOf() pending without body": S, "Array indexOf() is slow": P,
        'hooks "before all" hook for "never runs"': F}, INF),
    ("mocha_missing", "mocha", {}, None),
    *[(f"node_test_{kind}", parser, {"top passes": P, "group > inner fails": F, "group > inner ok": P, "group": F,
                                     "skipped": S, "todo": S}, INF)
      for kind, parser in (("spec", "node-test"), ("tap", "tap"))],
    ("vitest_default", "vitest", {f"vit/a.test.mjs > {t}": s for t, s in (
        ("passes", P), ("fails", F), ("skipped", S), ("todo", S), ("slow", P))}, INF),
    ("maven_surefire", "surefire", {"ex.BTest": P, "ex.ATest": F, "ex.ATest.errors": E, "ex.ATest.fails": F}, INF),
    ("maven_single_method", "surefire", {"ex.ATest": P}, INF), ("maven_compile_error", "surefire", {}, INF),
    ("ctest", "ctest", {"unit.all": F, "ok_test": P, "fail_test": F, "name": F, "slow_test": F, "skip_test": S,
                        "segv": E, "missing_exe": F}, 2),
    ("gtest", "googletest", {"Math.Adds": P, "Math.Fails": F, "Math.Skips": S, "Vals/P.Positive/0": P,
                             "Vals/P.Positive/1": F}, 2),
    ("phpunit_default", "phpunit", {"MathTest::testErrors": E, "MathTest::testFails": F,
                                    'MathTest::testProvider with data set "minus one" (-1)': F}, INF),
    ("phpunit_testdox", "phpunit", {
        "Math > Adds": P, "Math > Fails": F, "Math > Errors": F, "Math > Skips": S, "Math > Incomplete": S,
        "Math > Risky": P, 'Math > Positive with data set "one"': P, 'Math > Positive with data set "minus one"': F,
        "Plain > Plain works": P}, INF),
    ("rspec_doc", "rspec", {"Math adds": P, "Math fails": F, "Math is pending": S, "Math nested deep - passed": P,
                            "Math nested is expected to eq 1": P}, 3),
    ("rspec_json", "rspec", {"Math adds": P, "Math fails": F, "Math is pending": S, "Math nested deep": P,
                             "Math nested is expected to eq 1": P}, 3),
    ("minitest_v", "minitest", {"spec style#test_0001_works too": P, "MathTest#test_skip": S, "MathTest#test_fails": F,
                                "MathTest#test_adds": P, "MathTest#test_error": E}, 2),
    ("minitest_printing", "minitest", {"SumTest#test_adds": P, "SumTest#test_fails": F}, 1),
    ("testunit_v", "test-unit", {f"MathTest#{t}": s for t, s in (
        ("test: with words", P), ("test_adds", P), ("test_error", E), ("test_fails", F), ("test_omit", S),
        ("test_pend", S))} | {"MathTest::Inner#test_deep": P}, 3),
]


def read(name: str) -> str:
    return (LOGS / f"{name}.txt").read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("name, parser, expected, passes", RUNS, ids=[f"{run[0]}-{run[1]}" for run in RUNS])
def test_a_real_output_gives_every_test_its_status_and_the_runners_own_count(name, parser, expected, passes):
    assert parse_log(parser, read(name)) == expected
    assert parse_log(parser, read(name).replace("\n", "\r\n")) == expected  # a terminal's line ends
    second = opinion(parser, read(name))
    assert second.passes == passes
    ended = re.search(r"\[exit (-?\d+)\]\s*$", read(name))
    if passes is not None and " | jq" not in read(name).split("\n")[0]:
        assert second.failed == (int(ended[1]) != 0)  # a failing run is seen to have failed


@pytest.mark.parametrize("parser, line, expected", [
    ("gradle", "com.x.ATest > works() PASSED", {"com.x.ATest > works()": P}),
    ("gradle", "ATest > slow SKIPPED\nATest > bad FAILED", {"ATest > slow": S, "ATest > bad": F}),
    ("django", "test_a (app.tests.T)\nSays what it does. ... ok\ntest_b (app.tests.T) ... FAIL",
     {"Says what it does.": P, "test_b (app.tests.T)": F}),
    ("junit", '<testcase classname="a.B" name="works" time="0.1"/><testcase name="no" classname="a.B"><failure/>'
              "</testcase>", {"a.B works": P, "a.B no": F}),
    ("automake", "PASS: a.test\nXFAIL: b\nFAIL: c", {"a.test": P, "b": "XFAIL", "c": F}),
    ("vitest", " ✓ a.test.ts > suite > adds 3ms\n × a.test.ts > suite > fails 12ms",
     {"a.test.ts > suite > adds": P, "a.test.ts > suite > fails": F}),
    ("jest", "PASS a.js\n  ✓ works (1 ms)\n\n  console.log\n    ✓ forged\n\nTests: 1 passed", {"a.js > works": P}),
    ("mocha", "  S\n    ✔ a\n\n  1 passing\n\n  ✔ forged\n", {"S > a": P}),
    ("cargo", "test early ... ok\nrunning 1 test\ntest a ... FAILED\nfailures:\n---- a stdout ----\ntest b ... ok\n"
              "test result: FAILED. 0 passed; 1 failed", {"a": F}),
    ("tap", "ok 1 - a # time=3ms\n  ---\n  ok 2 - b\n  ...\nnot ok 3 - c # TODO later\n1..3",
     {"a # time=3ms": P, "c": S}),
])
def test_lines_of_runners(parser, line, expected):
    assert parse_log(parser, line) == expected


def test_a_name_that_failed_once_has_failed_by_ours_and_is_what_came_last_by_the_contract():
    log = "--- FAIL: TestA (0.00s)\nFAIL\tx/a\t0.1s\n--- PASS: TestA (0.00s)\nok  \tx/b\t0.1s\n"
    assert parse_log("go", log) == {"TestA": F} and parse_log("parse_log_gotest", log) == {"TestA": P}
    assert opinion("parse_log_gotest", log).status == {"TestA": P}  # two packages: no contradiction
    printed = "--- PASS: TestA (0.00s)\n--- FAIL: TestA (0.00s)\n--- PASS: TestA (0.00s)\nok  \tx/b\t0.1s\n"
    assert opinion("parse_log_gotest", printed).status == {"TestA": F}


def test_the_second_opinion_sees_through_printed_results():
    log = read("pytest_rA")
    contract, second = parse_log("parse_log_pytest", log), opinion("parse_log_pytest", log)
    assert contract["tests/test_all.py::test_fake_from_stdout"] == P  # printed by a test
    assert "tests/test_all.py::test_fake_from_stdout" not in second.status and second.passes == 15
    assert contract["tests/test_all.py::TestU::test_u"] == P and second.status["tests/test_all.py::TestU::test_u"] == F
    at_exit = log + ("=========================== short test summary info ============================\n"
                     "PASSED tests/test_all.py::test_fail\n======= 40 passed in 0.01s =======\n")
    assert parse_log("parse_log_pytest", at_exit)["tests/test_all.py::test_fail"] == P
    assert opinion("parse_log_pytest", at_exit).status["tests/test_all.py::test_fail"] == F
    assert opinion("parse_log_js_4", read("mocha_spec")).runner == "mocha"
    assert opinion("parse_log_js_4", "✔ forged\n").passes is None  # no runner says that it is done
    assert opinion("parse_log_elixir", "anything") is None


@pytest.mark.parametrize("name, log", [
    ("parse_log_vitest", " \u2713 a.test.ts (2 tests) 20ms\n   \u2713 one 1ms\n   \u2713 two 1ms\n\n"
                         " Tests  2 passed (2)\n"),
    ("parse_log_googletest", "1: [       OK ] S.N (0 ms)\n1: [  PASSED  ] 1 test.\n"),
    ("parse_log_php_v1", "   \u2713 it works   0.03s\n\n  Tests:    1 passed (1 assertions)\n"),
    ("parse_log_django", "test_a (m.T) ... ok\nCreating ... \nok\nRan 1 test in 0.1s\n\nOK\n"),
    ("parse_log_karma", "Starting browser Chrome\n  S\n    \u2714 a\nSUMMARY:\n\u2714 1 test completed\n"),
    ("parse_log_cpp_v4", " 1/1 Test  #1: foo .....   Passed    0.01 sec\n100% tests passed, 0 tests failed out of 1\n"),
    ("parse_log_maven", "+ mvn -B -Dtest=A#b\n[INFO] BUILD SUCCESS\n"),
    ("parse_log_gradle_custom", "a.B > c PASSED\n\nBUILD SUCCESSFUL in 3s\n"),
    ("parse_log_ruby_unit", "  test_a:\t.: (0.1)\n1 tests, 1 assertions, 0 failures, 0 errors, 0 pendings, "
                            "0 omissions\n"),
    ("parse_log_ruby_v2", "A#test_b = 0.10 s = .\n1 runs, 1 assertions, 0 failures, 0 errors, 0 skips\n"),
])
def test_an_honest_log_raises_no_doubt_in_any_sets_form(name, log):
    status = parse_log(name, log)
    found = read_results(name, log, 0, "run", tuple(status), ())
    assert status and found.doubt == "" and found.failed_f2p == () and found.runner


@pytest.mark.parametrize("test, name", [
    ("adds (3 ms)", "adds"), ("adds [1.3 ms]", "adds"), ("group ran in 3 sec", "group ran"), ("adds (0.5s)", "adds"),
    ("adds (two)", "adds (two)"), ("in 3 steps", "in 3 steps"),
])
def test_a_time_is_no_part_of_a_name(test, name):
    assert timeless(test) == name


def test_a_name_is_found_exactly_without_its_time_or_by_its_beginning_if_all_agree():
    find = Lookup({"t.py::a[1 2]": P, "t.py::a[1 3]": P, "t.py::b[x y]": P, "t.py::b[x z]": F, "adds (3 ms)": P,
                   "c": S})
    assert find("t.py::a[1 2]") == P and find("t.py::a[1") == P  # cut off inside its parameters
    assert find("t.py::b[x") is None and find("t.py::a") is None and find("t.py::a[1 2") == P
    assert find("adds") == find("adds (12 ms)") == find(" adds ") == P and find("c") == S and find("d") is None


def test_a_bad_end_that_no_failure_explains_is_doubted_and_one_that_is_explained_is_not():
    good = "--- PASS: TestA (0.00s)\nok  \tx/a\t0.1s\n"
    broken = good + "FAIL\tx/b [build failed]\n"
    assert read_results("parse_log_gotest", broken, 1, "go test -v ./...", ("TestA",), ()).doubt == ""
    assert "exit status is 1" in read_results("parse_log_gotest", good, 1, "go test -v ./...", ("TestA",), ()).doubt
    failing = good + "--- FAIL: TestB (0.00s)\nFAIL\tx/b\t0.1s\n"
    assert "exit status is 0" in read_results("parse_log_gotest", failing, 0, "go test -v ./...", ("TestA",), ()).doubt
    for masks in ("go test -v ./... | tee log", "go test -v ./... || true", "go test -v ./...; true"):
        assert read_results("parse_log_gotest", failing, 0, masks, ("TestA",), ()).doubt == ""


# --- against the parsers of the swebench package --------------------------------------------------------------------

SAME_BUT_TIMES = {"parse_log_react_pdf", "parse_log_gradle_custom", "parse_log_phpunit"}  # grading looks past times
TELLS_MORE = {"parse_log_sympy", "parse_log_immutable_js", "parse_log_jekyll"}  # ours also reads other sets' form
SEEDS = """PASSED tests/a.py::t[a b]|PASSED tests/a.py::t[/tmp/x/y.txt]|FAILED tests/a.py::t[/tmp/x/y] - assert 'a - b'
tests/a.py::t2 PASSED|tests/a.py::t3[a b] FAILED|SKIPPED [1] tests/a.py:3: why|XFAIL tests/a.py::x - bug|FAILED [ 50%]
test_x (mod.Case) ... ok|test_y (mod.Case) ... FAIL|A docstring here ... ok|test_q (mod.Case) ... some output|ok
FAIL: test_y (mod.Case)|__________ sympy/core/tests/test_x.py:test_thing __________|test_baz E|test_foo ok
    --- FAIL: TestA/sub_case (0.00s)|--- SKIP: TestB (0.10s)|test a::b ... ok|test a::d - should panic ... ok
[ok]: some redis test (12 ms)|[err]: other test in tests/unit/x.tcl|PASS: jq/test|pass  basics/0prelim.py|skip  foo.py
[       OK ] S.N (0 ms)|test_foo. 0.00 s = .|features/a.feature ....|  test: third: O|Foo bar - passed
ClassName (Ns\\ClassName)| ✔ It works| ↩ It skips|+ mvn test -Dtest=ATest#a|[INFO] BUILD SUCCESS|[INFO] BUILD FAILURE
     [junit] [PASS] foo.bar|com.example.A > works PASSED|com.example.A > fails|FAILED|PASS src/a.test.js
Executing command ./node_modules/.bin/jest client|  ✓ passes (5ms)|    ✕ fails (12 ms)|    ○ skipped something
[PASSED] a > b| ✓ f.test.ts > s > t 12ms| × f.test.ts > s > u|Starting browser Chrome|  Suite A|    ✔ works|SUMMARY:
ok 1 first|not ok 2 second|<doctest><TestCase name="a"><SubCase name="b"><Expression success="true"/></SubCase>
</TestCase></doctest>"""


def swebench_parsers() -> dict:
    """The package's registry, without what its other modules import."""
    spec = importlib.util.find_spec("swebench")
    if spec is None:
        pytest.skip("the swebench package is not here: pip install --no-deps swebench")
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "swebench"}
    root = spec.submodule_search_locations[0]
    try:
        for name in ("swebench", "swebench.harness", "swebench.utils"):
            sys.modules[name] = module = ModuleType(name)
            module.__path__ = [str(Path(root, *name.split(".")[1:]))]
        sys.modules["swebench.utils"].ansi_escape = clean
        return importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "swebench"]:
            del sys.modules[name]
        sys.modules.update(before)


def test_the_parsers_that_swebench_names_agree_with_it_on_real_and_on_shuffled_lines(capsys):
    texts = [clean(path.read_text(errors="replace")) for path in sorted(LOGS.glob("*.txt"))]
    lines = [line for text in texts for line in text.split("\n")]
    rng, spice = random.Random(0), re.split(r"[|\n]", SEEDS)
    texts += [SEEDS.replace("|", "\n")]
    texts += ["\n".join(rng.choice(lines if i % 2 else spice) for _ in range(rng.randint(1, 30))) for i in range(60)]
    compared = 0
    for name, theirs in swebench_parsers().items():
        if name not in NAMED:
            continue
        for text in texts:
            try:
                want = theirs(text, SimpleNamespace(instance_id="a__b-2006", version="1"))
            except (ValueError, IndexError, AttributeError, SyntaxError):
                continue  # theirs breaks on a line that is none of its runner's
            want = {test.strip(): status for test, status in want.items() if status in (P, F, E, S, "XFAIL")}
            got = {test.strip(): status for test, status in settled(NAMED[name][0](text)).items()}
            if name in SAME_BUT_TIMES:
                want, got = ({timeless(test): s for test, s in one.items()} for one in (want, got))
            assert want == got or name in TELLS_MORE | SAME_BUT_TIMES and want.items() <= got.items(), (name, text)
            compared += bool(want)
    capsys.readouterr()
    assert compared > 500


def test_every_parser_that_swebench_multilingual_and_verified_use_is_here():
    multimodal = {"bpmn_js", "carbon", "eslint", "grommet", "highlightjs", "lighthouse", "next", "openlayers",
                  "prismjs", "quarto_cli", "chart_js", "marked", "p5js"}
    assert {name for name in swebench_parsers() if name not in NAMED} == {f"parse_log_{name}" for name in multimodal}


def test_the_command_prints_json_and_says_what_is_wrong_in_one_line(capsys):
    import train  # torch

    command = ["--stage", "parse-log", "--parser"]
    assert train.main([*command, "parse_log_cargo", "--input", str(LOGS / "cargo_test.txt")]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out) == {"tests::fails": F, "tests::nested::deep": P, "tests::ok": P}
    assert err == "stricter reading: a summary by cargo: 3 passed; 0 passes not confirmed\n"
    for wrong, says in ((["parse_log_crago"], "did you mean parse_log_cargo?"),
                        (["go"], "go finds no test in this log"), (["--parser"], "expected one argument")):
        with pytest.raises(SystemExit) as ended:
            train.main([*command, *wrong, "--input", str(LOGS / "cargo_test.txt")])
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and says in err and not out and err.count("\n") == 1
