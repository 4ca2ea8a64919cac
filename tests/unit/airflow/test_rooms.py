"""The arrow between the rooms runs one way: dags -> hsx_operators -> contract; the host knows nothing of Airflow."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
# SGLang brings them along; each is imported only where it is used, so that verbs that don't need it start at once.
LAZY = {"torch", "datasets", "pyarrow", "transformers", "zstandard"}
ROOMS = {
    "dags": {"airflow", "hsx_operators"},
    "plugins/hsx_operators": {"airflow", "paramiko", "asyncssh", "pydantic", "pydantic_core", "yaml", "croniter",
                              "hsx_operators", "hsx_host"},
    "plugins/hsx_page": {"airflow", "fastapi", "sqlalchemy", "hsx_operators", "hsx_page"},
    "include/hsx_host": {"requests", "urllib3", "numpy", "safetensors", "torch", "psutil", "xxhash", "isal", "hsx_host",
                         *LAZY},
    "include/hsx_train": {"torch", "numpy", "transformers", "speculators"},
    # numpy to psutil: what torch and SGLang bring with them; nothing is installed for the patches; isal may be there
    "include/patches": {"torch", "sglang", "numpy", "safetensors", "packaging", "psutil", "isal", "hsx_capture",
                        "hsx_cpu"},
}  # fmt: skip


def imports(path: Path) -> dict[str, int]:
    """Every module that a file imports, at its top or inside functions, with the line."""
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{alias.name}": node.lineno for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    files = sorted((REPO / room).rglob("*.py"))
    assert files
    strangers = [
        f"{path.relative_to(REPO)}:{line} imports {name}"
        for path in files
        for name, line in imports(path).items()
        if (top := name.split(".")[0]) not in ROOMS[room] and top not in sys.stdlib_module_names
    ]
    assert strangers == []


def test_the_host_imports_heavy_libraries_only_inside_functions() -> None:
    at_once = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for path in sorted((REPO / "include/hsx_host").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
        if name.split(".")[0] in LAZY
    ]
    assert at_once == []


def test_operators_and_host_share_the_contract_alone() -> None:
    beyond = [
        f"{path.name}:{line} imports {name}"
        for path in sorted((REPO / "plugins/hsx_operators").rglob("*.py"))
        for name, line in imports(path).items()
        if name.startswith("hsx_host") and not name.startswith("hsx_host.contract")
    ]
    assert beyond == []
