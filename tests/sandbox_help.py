"""What the sandbox tests share: a small task and a way to open a local box at its base."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from oprd.sandbox.box import Limits
from oprd.sandbox.local import LocalSandbox
from oprd.sandbox.repo import prepare
from oprd.sandbox.sweep import run_label
from oprd.sandbox.task import Task

TEST = """import unittest
from src.words import add, keep


class Test(unittest.TestCase):
    def test_keep(self):
        self.assertEqual(keep(3), 3)
"""
SOURCE = "def add(a, b):\n    return a - b\n\n\ndef keep(a):\n    return a\n"
FILES = {"src/words.py": SOURCE, "tests/test_words.py": TEST, "README.md": "words\n"}

PATCH = """diff --git a/src/words.py b/src/words.py
--- a/src/words.py
+++ b/src/words.py
@@ -1,5 +1,5 @@
 def add(a, b):
-    return a - b
+    return a + b
 
 
 def keep(a):
"""
TEST_PATCH = """diff --git a/tests/test_words.py b/tests/test_words.py
--- a/tests/test_words.py
+++ b/tests/test_words.py
@@ -5,3 +5,6 @@
 class Test(unittest.TestCase):
     def test_keep(self):
         self.assertEqual(keep(3), 3)
+
+    def test_add(self):
+        self.assertEqual(add(1, 2), 3)
"""

TASK = Task("words-1", "micro/words", "0" * 40, "add() subtracts.", PATCH, TEST_PATCH,
            ("test_add (test_words.Test.test_add)",), ("test_keep (test_words.Test.test_keep)",),
            {"test_cmd": "python -m unittest discover -v -s tests", "log_parser": "unittest"}, files=FILES)


@contextmanager
def open_local(task: Task, limits: Limits = Limits()):
    """A local box at the task's base."""
    with LocalSandbox({}, limits, run_label(Path("/test/run"))) as box:
        prepare(task, box)
        yield box


def with_files(**changes: str) -> Task:
    """The task with other or further files in its base; `__` in a name stands for `/`, `_dot_` for `.`."""
    names = {name.replace("_dot_", ".").replace("__", "/"): text for name, text in changes.items()}
    return replace(TASK, files=FILES | names)
