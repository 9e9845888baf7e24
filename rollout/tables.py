"""Tables for a terminal."""

from __future__ import annotations

from typing import Sequence


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns, the first to the left and the others to the right; the first row is the head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
             for row in rows]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])
