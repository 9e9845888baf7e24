"""The leak filter: pieces of the reference patch and of hidden tests are found however they are cut and spaced."""

import random

import pytest

from oprd.rollout.global_reminder import Signal, global_reminder, verification_feedback
from oprd.rollout.leaks import RUN, TOKEN, Secrets
from oprd.sandbox.microswe import generate
from oprd.sandbox.task import Task
from oprd.sandbox.verify import Verdict

GOLD = """\
diff --git a/src/tax.py b/src/tax.py
--- a/src/tax.py
+++ b/src/tax.py
@@ -3,7 +3,9 @@ def tax(total, rate):
     if total is None:
-        return fallback(total, rate, None)
+        limit = self.registry.lookup(total, rate)
+        return compute(total, rate, limit) if limit else 0
     return old_value(total, rate, 1, 2)
--- a/src/x.py
+++ b/src/x.py
@@ -1 +1,2 @@
+++ counter
"""
TESTS = """\
diff --git a/tests/test_tax.py b/tests/test_tax.py
--- /dev/null
+++ b/tests/test_tax.py
@@ -0,0 +1,6 @@
+def test_tax_of_nothing():
+    book = make_book(rows=3, currency="EUR")
+    assert book.tax(None) == {'EUR': 0, 'rows': [1, 2, 3]}
+    with pytest.raises(ValueError, match="no rate is known"):
+        book.tax(3)
"""
STATEMENT = "`tax` fails for None. See `self.ledger.entries(total, rate, limit, None)`."


def task(patch=GOLD, tests=TESTS, statement=STATEMENT):
    return Task("t", "r", "0", statement, patch, tests, ("tests/test_tax.py::test_tax_of_nothing",), (), {})


SECRETS = Secrets.of(task())


@pytest.mark.parametrize("text", [
    "return compute(total, rate, limit) if limit else 0",
    "AssertionError: compute(total, rate, limit) was not called",
    "E   return compute( total,\n      rate, limit )",
    "'        limit = self.registry.lookup(total, rate)\\n        return'",
    "lookup(total, rate)\n return compute(",  # over a line end
    "call book.tax(None) == {'EUR'",
    'book = make_book(rows=3, currency="EUR")',
    "book=make_book(rows=3,currency='EUR')",
    "with pytest.raises(ValueError, match=...)",
    "`book.tax(3)`",  # a whole line
    "++ counter",
])
def test_a_piece_of_a_secret_is_found(text):
    assert SECRETS.shown_in(text)


@pytest.mark.parametrize("text", [
    "", "AssertionError: {} != {'EUR': 0, 'rows': [1, 2, 3]}",  # the expected value is evidence
    "ValueError: no rate is known", "AttributeError: 'Book' object has no attribute 'registry'",
    "tests/test_tax.py:8 test_tax_of_nothing: TypeError: make_book() got an unexpected keyword argument 'rows'",
    "NameError: name 'compute' is not defined",
    "return old_value(total, rate, 1, 2)",  # a line the patch keeps
    "return fallback(total, rate, None)",  # a line it removes
    "self.ledger.entries(total, rate, limit, None)",  # the statement says so
    "src/tax.py and tests/test_tax.py", "compute(total",
])
def test_evidence_and_what_is_known_anyway_pass(text):
    assert not SECRETS.shown_in(text)


def test_a_task_without_diffs_has_no_secrets():
    assert Secrets.of(task("", "", "")) == Secrets(frozenset(), frozenset())
    assert not Secrets.of(task("", "", "")).shown_in("anything at all, really anything")


def respaced(rng, text):
    """The same tokens with other blanks and, at random, other quotes."""
    quote = rng.choice("\"'")
    blank = rng.choice([" ", "\n    ", "\\n  ", "\t"])
    return blank.join(TOKEN.findall(text.replace('"', quote).replace("'", quote)))


@pytest.mark.parametrize("seed", range(60))
def test_no_reminder_shows_a_piece_of_a_secret_line_wherever_the_log_quotes_it(seed):
    rng = random.Random(seed)
    added = [line[1:] for line in (GOLD + TESTS).splitlines() if line.startswith("+") and line[1:2] == " "]
    line = rng.choice([line for line in added if "{" not in line and "match" not in line])  # they end in values
    tokens = TOKEN.findall(line.replace('"', "").replace("'", ""))
    cut = rng.randint(0, max(0, len(tokens) - RUN - 2))
    piece = respaced(rng, " ".join(tokens[cut:])) if rng.random() < 0.5 else line[rng.randint(0, 4):]
    message = f"AssertionError: {'x ' * rng.randint(0, 3)}{piece}{' y' * rng.randint(0, 3)}"
    signals = [Signal("assertion", 1, ("test_tax_of_nothing",), "tests/test_tax.py:3", message),
               Signal("generic", 3, ("test_other",), "", "KeyError: 'k'")]
    text = verification_feedback(task(), Verdict(False, touched=("src/tax.py",)), signals)
    assert piece not in text and not SECRETS.shown_in(text)
    assert "test_tax_of_nothing: failed" in text and "KeyError: 'k'" in text  # the failures are still named


def test_a_secret_is_looked_for_in_the_whole_message_not_in_what_is_left_after_the_cut():
    message = "x" * 158 + " compute(total, rate, limit) if limit else 0"
    text = verification_feedback(task(), Verdict(False), [Signal("assertion", 1, ("test_a",), "", message)])
    assert "xxx" not in text and "test_a: failed" in text


def test_a_place_or_a_test_name_that_shows_a_secret_costs_its_signal():
    leaky = Signal("assertion", 1, ("test_a[return compute(total, rate, limit)]",), "", "1 != 2")
    text = verification_feedback(task(), Verdict(False), [leaky, Signal("generic", 3, ("test_b",), "", "k")])
    assert "compute" not in text and "test_b" in text


@pytest.mark.parametrize("index", range(12))
def test_on_microswe_a_log_that_quotes_patch_and_tests_line_by_line_gives_none_of_it_away(index):
    micro = generate(11, index)
    added = [line[1:] for diff in (micro.patch, micro.test_patch) for line in diff.splitlines()
             if line.startswith("+") and not line.startswith("+++") and len(line.strip()) > 9]
    names = [test.split(" ")[0] for test in micro.fail_to_pass]
    log = "".join(f"{'=' * 70}\nFAIL: {name} (test_x.T.{name})\n{'-' * 70}\nAssertionError: {line}\n\n"
                  for name in names for line in added)
    verdict = Verdict(False, patch_applied=True, touched=(micro.meta["path"],), log=log,
                      failed_f2p=micro.fail_to_pass)
    text = global_reminder(micro, verdict).text
    assert not any("".join(line.split()) in "".join(text.split()) for line in added) and names[0] in text
