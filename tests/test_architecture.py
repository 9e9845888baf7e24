"""The floors of docs/architecture.md: who may import whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "sandbox": {"sandbox"},
    "parallel": {"parallel", "kernels"},
    "core": {"core", "parallel", "kernels"},
    "rollout": {"rollout", "sandbox", "core.types", "core.chat", "core.settings", "core.disk", "core.sources"},
}
FILES = [(room, path) for room in MAY_IMPORT for path in sorted((ROOT / room).glob("*.py"))]


def imports(path: Path) -> set[str]:
    """Every module a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("room,path", FILES, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_a_room_imports_only_the_floors_below(room, path):
    allowed = MAY_IMPORT[room]
    for module in imports(path):
        assert module.split(".")[0] not in MAY_IMPORT, f"{path.name} imports {module}: rooms are imported as oprd.{module}"
        if module.startswith("oprd.") and module.count(".") > 1:
            inside = module.removeprefix("oprd.")
            assert any(inside == a or inside.startswith(a + ".") for a in allowed), f"{room}/{path.name} imports {module}"


@pytest.mark.parametrize("path", sorted((ROOT / "sandbox").glob("*.py")), ids=lambda path: path.name)
def test_the_sandbox_room_needs_no_torch(path):
    assert not {m for m in imports(path) if m.split(".")[0] in ("torch", "numpy", "transformers")}


def test_no_room_is_a_top_level_package():
    assert not list(ROOT.glob("*/__init__.py"))


def test_every_file_on_the_map_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    import re

    named = set(re.findall(r"`((?:core|kernels|parallel|rollout|sandbox|tests)/[\w.]+)`", text))
    assert named and all((ROOT / name).exists() for name in named), [n for n in named if not (ROOT / n).exists()]
