"""Running train.py's commands in this process, as a person would."""

import pytest

import train


def refused(capsys, *argv) -> str:
    """The one line that a refused command ends with (exit code 2)."""
    with pytest.raises(SystemExit) as stop:
        train.main([*map(str, argv)])
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert stop.value.code == 2 and len(lines) == 1 and err.rstrip().splitlines()[-1] == lines[0]
    return lines[0]
