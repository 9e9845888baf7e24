"""A git repository with one commit, made without a git process: the bytes of its files.

Thousands of five-file repositories a minute are made here; `git init; git add; git commit` would cost three
processes each. The formats (loose objects, index version 2) are git's documented ones, and the test asks git.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Mapping

FILE, FOLDER = 0o100644, 0o40000
AUTHOR = b"Developer <developer@example.invalid> 1700000000 +0000"  # fixed, so that a tree has one commit id
CONFIG = (b"[core]\n\trepositoryformatversion = 0\n\tfilemode = true\n\tbare = false\n"
          b"[user]\n\tname = Developer\n\temail = developer@example.invalid\n")


def one_commit(files: Mapping[str, bytes], message: bytes = b"Base\n") -> tuple[str, dict[str, bytes]]:
    """(commit id, path inside .git -> bytes) of a repository whose only commit holds `files` (mode 644)."""
    store: dict[str, bytes] = {}
    blobs = {path.encode(): _add(store, b"blob", data) for path, data in files.items()}
    tree = _tree(store, blobs)
    commit = _add(store, b"commit", b"tree %s\nauthor %s\ncommitter %s\n\n%s"
                  % (tree.hex().encode(), AUTHOR, AUTHOR, message)).hex()
    store |= {"HEAD": b"ref: refs/heads/main\n", "refs/heads/main": commit.encode() + b"\n", "config": CONFIG,
              "index": _index(blobs)}
    return commit, store


def _add(store: dict[str, bytes], kind: bytes, data: bytes) -> bytes:
    whole = b"%s %d\0%s" % (kind, len(data), data)
    digest = hashlib.sha1(whole)
    name = digest.hexdigest()
    store[f"objects/{name[:2]}/{name[2:]}"] = zlib.compress(whole, 1)
    return digest.digest()


def _tree(store: dict[str, bytes], blobs: Mapping[bytes, bytes]) -> bytes:
    """Write the tree of `blobs` (path -> object id) and of its folders; the tree's object id."""
    entries: dict[bytes, tuple[int, bytes]] = {}
    folders: dict[bytes, dict[bytes, bytes]] = {}
    for path, blob in blobs.items():
        first, slash, rest = path.partition(b"/")
        if slash:
            folders.setdefault(first, {})[rest] = blob
        else:
            entries[first] = FILE, blob
    for name, inside in folders.items():
        entries[name] = FOLDER, _tree(store, inside)
    # git orders a folder as if its name ended in a slash
    ordered = sorted(entries.items(), key=lambda e: e[0] + b"/" if e[1][0] == FOLDER else e[0])
    return _add(store, b"tree", b"".join(b"%o %s\0%s" % (mode, name, oid) for name, (mode, oid) in ordered))


def _index(blobs: Mapping[bytes, bytes]) -> bytes:
    """All stat fields are zero: git finds them stale and compares contents once."""
    out = [struct.pack(">4sII", b"DIRC", 2, len(blobs))]
    for path, blob in sorted(blobs.items()):
        entry = struct.pack(">6I", 0, 0, 0, 0, 0, 0) + struct.pack(">4I", FILE, 0, 0, 0)
        entry += blob + struct.pack(">H", min(len(path), 0xFFF)) + path
        out.append(entry + b"\0" * (8 - len(entry) % 8))
    body = b"".join(out)
    return body + hashlib.sha1(body).digest()
