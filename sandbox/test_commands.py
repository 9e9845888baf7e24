"""Commands that run the hidden tests of sets whose rows do not simply give one.

Our grading puts the official tests in place itself (sandbox/verify.py), so a set's script is used without its git
commands and patches. Scripts that need bash run in one `bash -c`.
"""

from __future__ import annotations

import re
import shlex
from typing import Sequence

from oprd.sandbox.patches import file_changes
from oprd.sandbox.results import END, START

_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
CONDA = "source /opt/miniconda3/bin/activate\nconda activate testbed\nexport LANG=C.UTF-8 LC_ALL=C.UTF-8"
_PYTEST = "pytest --no-header -rA --tb=no -p no:cacheprovider"
# SWE-bench's twelve Python repositories and SWE-Gym's eleven: runner, parser (of rows that carry no eval_script).
_BENCH = {"astropy/astropy": ("pytest -rA -vv -o console_output_style=classic --tb=no", "parse_log_astropy"),
          "django/django": ("./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
                            "parse_log_django"),
          "matplotlib/matplotlib": (_PYTEST, "parse_log_matplotlib"),
          "mwaskom/seaborn": ("pytest --no-header -rA", "parse_log_seaborn"),
          "pallets/flask": (_PYTEST, "parse_log_flask"),
          "psf/requests": (_PYTEST, "parse_log_requests"), "pydata/xarray": (_PYTEST, "parse_log_xarray"),
          "pylint-dev/pylint": (_PYTEST, "parse_log_pylint"), "pytest-dev/pytest": ("pytest -rA", "parse_log_pytest"),
          "scikit-learn/scikit-learn": (_PYTEST, "parse_log_scikit"),
          "sphinx-doc/sphinx": ("tox --current-env -epy39 -v --", "parse_log_sphinx"),
          "sympy/sympy": ("PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
                          "parse_log_sympy")}
_GYM = {"getmoto/moto": "pytest -n0 -rA", "python/mypy": "pytest -n0 -rA -k", "project-monai/monai": "pytest -rA",
        "dask/dask": "pytest -n0 -rA --color=no", "pandas-dev/pandas": "pytest -rA",
        "facebookresearch/hydra": "pytest -rA", "conan-io/conan": "pytest -n0 -rA",
        "modin-project/modin": "pytest -n0 -rA", "iterative/dvc": "pytest -rA", "bokeh/bokeh": "pytest -rA -n0",
        "pydantic/pydantic": "pytest -rA --tb=short -vv -o console_output_style=classic --no-header"}


def of_repository(repo: str, test_patch: str, version: str, gym: bool = False) -> tuple[str, str]:
    """(command, parser) by SWE-bench's or SWE-Gym's rule for the repository. Raises ValueError for another one."""
    name = repo.lower()
    known = _GYM if gym else _BENCH
    if name not in known:
        raise ValueError(f"repo = {repo!r}: the row has no eval_script, and a test command is known only for "
                         f"{', '.join(sorted(known))}; take the rows of swebench 5 (they have eval_script, log_parser)")
    files = [change.path for change in file_changes(test_patch.encode()) if not change.deleted
             and not change.path.endswith(_NO_TESTS)]
    if gym:
        runner, parser = _GYM[name], "parse_log_pytest_pydantic" if name == "pydantic/pydantic" else "parse_log_pytest"
        if name == "python/mypy":  # cases of data files, chosen by name
            files = [" or ".join(re.findall(r"\[case ([^\]]+)\]", test_patch))]
    else:
        runner, parser = _BENCH[name]
        if name == "django/django":
            files = [re.sub(r"\.py$", "", path).removeprefix("tests/").replace("/", ".") for path in files]
            runner = runner.partition(" --settings")[0] if version.startswith("1.9") else runner
    return bash(f"{CONDA}\n{runner} {' '.join(map(shlex.quote, files))}"), parser


def from_eval_script(script: str) -> str:
    """SWE-bench's eval script without what it does to the repository, ending with its tests' status.

    Raises ValueError when the marks around the tests are missing.
    """
    kept: list[str] = []
    here: str | None = None
    for line in script.split("\n"):
        if here is not None:
            here = None if line.strip() == here else here
        elif re.match(r"\s*(?:git|\.?/?git) ", line) or re.match(r"\s*#!", line):
            if match := re.search(r"<<-? *['\"]?(\w+)['\"]?", line):
                here = match[1]
        elif not re.match(r"\s*set -[a-z]+", line) and "SWEBENCH_TEST_EXIT_CODE" not in line:
            kept.append(line)
    start, end = (next((i for i, line in enumerate(kept) if mark in line), None) for mark in (START, END))
    if start is None or end is None or end <= start:
        raise ValueError(f"eval_script has no lines {START!r} and {END!r} around its tests")
    before, tests = kept[:start], kept[start + 1:end]
    return bash("\n".join(["set -xo pipefail", *before, f": '{START}'", *tests, "status=$?", f": '{END}'",
                           "exit $status"]))


def pro_command(run: str, parse: str, files: Sequence[str], mark: str) -> str:
    """SWE-bench Pro's run script over its files, its parser over what that wrote, and the parser's file in one line."""
    folder = "/tmp/.swe-bench-pro"
    names = shlex.quote(",".join(map(str, files)))
    return bash("\n".join([
        f"mkdir -p {folder}", f"printf %s {shlex.quote(run)} > {folder}/run.sh",
        f"printf %s {shlex.quote(parse)} > {folder}/parse.py",
        f"bash {folder}/run.sh {names} > {folder}/out 2> {folder}/err; status=$?",
        f"cat {folder}/out {folder}/err", f"python3 {folder}/parse.py {folder}/out {folder}/err {folder}/results.json",
        f"printf '\\n{mark}'; tr '\\n' ' ' < {folder}/results.json; echo", "exit $status"]))


def bash(script: str) -> str:
    return f"bash -c {shlex.quote(script)}"
