"""Runs a command and ends it, with all that it started, when whoever started this goes away, by whatever death: the end
of standard input is the sign. Started as a leader of its own session: python guard.py COMMAND..."""

import os
import signal
import subprocess
import sys
import threading


def end() -> None:
    """End the whole process group, this process with it."""
    os.killpg(os.getpgid(0), signal.SIGKILL)


def watch() -> None:
    sys.stdin.buffer.read()
    end()


if __name__ == "__main__":
    assert os.getpgid(0) == os.getpid(), "the guard must lead a process group of its own"
    threading.Thread(target=watch, daemon=True).start()
    code = subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL)
    print(f"ended with code {code}", flush=True)
    end()
