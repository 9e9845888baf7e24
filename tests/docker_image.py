"""A small image for the Docker tests, made offline from this machine's own busybox, git and Python, and cached on
the engine by its tag."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

TAG = "oprd-test:3"
APPLETS = ("sh cat cp chmod cut date dd df dirname env find grep head id kill ln ls mkdir mkfifo mv nohup ps pwd "
           "readlink rm sed seq setsid sleep sort tail test touch tr true false wc xargs yes printf").split()


def engine():
    """(docker client, "") or (None, why there is none)."""
    try:
        import docker
    except ImportError:
        return None, "the docker SDK is not installed"
    try:
        client = docker.from_env(timeout=60)
        client.ping()
    except Exception as problem:  # whatever way an engine has of not answering
        return None, f"no docker engine answers ({type(problem).__name__})"
    return client, ""


def image(client) -> str:
    """The image's tag; made when the engine has none. Raises RuntimeError naming the tool this machine lacks."""
    if any(TAG in found.tags for found in client.images.list()):
        return TAG
    name, tag = TAG.split(":")
    client.api.import_image_from_data(_root_filesystem(), repository=name, tag=tag)
    return TAG


def derived(client, name: str, script: str, folder: str = "/repo") -> str:
    """A tag of the test image in which `script` has run in `folder`, its working folder. For a test of its own."""
    tag = f"oprd-test-{name}:1"
    container = client.containers.create(image(client), ["sh", "-ec", script], working_dir=folder, network_mode="none")
    try:
        container.start()
        if container.wait(timeout=60)["StatusCode"]:
            raise AssertionError(container.logs().decode("utf-8", "replace"))
        container.commit(*tag.split(":"), conf={"WorkingDir": folder, "Cmd": ["sh"]})
    finally:
        container.remove(force=True, v=True)
    return tag


def _root_filesystem() -> bytes:
    tools = {name: shutil.which(name, path="/usr/bin:/bin") for name in ("busybox", "git", "python3")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        raise RuntimeError(f"no {missing[0]} in /usr/bin to make the test image of")
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", dereference=True) as tar:
        for folder in ("tmp", "proc", "sys", "dev", "etc"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        real = {name: os.path.realpath(path) for name, path in tools.items()}
        files = {f"/usr/bin/{name}": path for name, path in real.items()}
        for path in real.values():
            files |= _libraries(path)
        stdlib = Path("/usr/lib") / Path(real["python3"]).name
        for path in stdlib.rglob("*"):
            if path.is_file() and not {"test", "idlelib", "lib2to3", "__pycache__", "dist-packages"} & set(path.parts):
                files[str(path)] = str(path)
                if path.suffix == ".so":
                    files |= _libraries(str(path))
        for inside, path in sorted(files.items()):
            tar.add(path, inside.lstrip("/"), recursive=False)
        for applet in APPLETS:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "/usr/bin/busybox"
            tar.addfile(entry)
        entry = tarfile.TarInfo("usr/bin/python")
        entry.type, entry.linkname = tarfile.SYMTYPE, "python3"
        tar.addfile(entry)
    return out.getvalue()


def _libraries(program: str) -> dict[str, str]:
    """The shared libraries a program is linked with (none for a static one)."""
    listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    return {word: word for line in listed.splitlines() for word in line.split() if word.startswith("/")}
