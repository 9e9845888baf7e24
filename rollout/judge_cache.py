"""Answers of a judge, kept on the disk by what was asked: a rerun costs nothing.

One small file an answer, `ab/abcd....json`: {"request": KEY, "answer": TEXT}. It is written aside and renamed, so
threads and processes may share a folder; a file that is damaged, or of another request, counts as absent and is
written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any


class Cache:
    """Raises OSError (NotADirectoryError, PermissionError ...) for a folder that cannot be made."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @staticmethod
    def key(request: Any) -> str:
        """The name of a request: the SHA-256 of its canonical JSON."""
        text = json.dumps(request, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def get(self, key: str) -> str | None:
        try:
            entry = json.loads(self._file(key).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        whole = isinstance(entry, dict) and entry.get("request") == key and isinstance(entry.get("answer"), str)
        return entry["answer"] if whole else None

    def put(self, key: str, answer: str) -> None:
        """Keep an answer. A disk that takes no more costs the entry, not the run."""
        file = self._file(key)
        try:
            file.parent.mkdir(exist_ok=True)
            handle, aside = tempfile.mkstemp(prefix=f"{key[:8]}.", suffix=".tmp", dir=file.parent)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as out:
                    json.dump({"request": key, "answer": answer}, out)
                os.replace(aside, file)
            except BaseException:
                os.unlink(aside)
                raise
        except OSError as problem:
            logging.getLogger(__name__).warning(f"a judge's answer could not be kept: {problem}")

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"
