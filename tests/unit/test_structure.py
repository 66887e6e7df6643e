"""The rules that keep the tree readable: one-way imports, ceilings, thin model.py files."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from deepseek_triton import errors
from deepseek_triton.config import settings

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "deepseek_triton"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_MODEL_PY_LINES = 30
ERRORS = {name for name in vars(errors) if name.endswith("Error")}

# A module may import from its own row and the rows before it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "log", "metrics", "arguments"),
    ("config", "request", "wire"),
    ("checkpoint",),
    ("quantize",),
    ("export",),
    ("build",),
    ("kv_cache",),
    ("text",),
    ("kernels",),
    ("scheduler",),
    ("runner",),
    ("calibrate", "evaluate"),
    ("engine",),
    ("backend",),
    ("gateway",),
    ("server",),
)
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
# Plain data that every layer may read.
PURE_DATA = {
    f"{PACKAGE}.checkpoint.spec",
    f"{PACKAGE}.kv_cache.spec",
    f"{PACKAGE}.quantize.int4",
}


def tracked_python_files() -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listing.split() if (ROOT / name).exists()]


FILES = tracked_python_files()
PACKAGE_FILES = [path for path in FILES if path.is_relative_to(ROOT / PACKAGE)]


def layer_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def imported_modules(path: Path) -> list[str]:
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            modules.append(node.module)
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return [m for m in modules if m.split(".")[0] == PACKAGE]


def settings_named_alone(path: Path) -> list[str]:
    """Where an error names a setting without its environment variable (config.label)."""
    keys = re.compile(rf"\b({'|'.join(setting.key for setting in settings())})\b")
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ERRORS:
            calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
            handed_on = {id(part) for call in calls if call is not node for part in ast.walk(call)}
            for part in ast.walk(node):
                text = part.value if isinstance(part, ast.Constant) else None
                if isinstance(text, str) and id(part) not in handed_on and keys.search(text):
                    found.append(f"{path.relative_to(ROOT)}:{part.lineno}: {text}")
    return found


def misdirected(importer: str, imported: str) -> bool:
    """Whether layer `importer` may not import module `imported`."""
    target = layer_of(imported)
    if target is None or target not in RANK or imported in PURE_DATA:
        return False
    if any(data.startswith(f"{imported}.") for data in PURE_DATA):
        return False  # the package around pure data; its members are listed apart
    if any(imported.startswith(f"{data}.") for data in PURE_DATA):
        return False
    return RANK[target] > RANK[importer] or (
        RANK[target] == RANK[importer] and target != importer and importer in ("errors", "log")
    )


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    layer = layer_of(module)
    if layer in (None, "__init__"):
        return
    assert layer in RANK, f"{layer} has no place in LAYERS"
    wrong = sorted({m for m in imported_modules(path) if misdirected(str(layer), m)})
    assert not wrong, f"{module} is below {wrong} and may not import it"


def test_the_direction_check_can_fail() -> None:
    assert misdirected("checkpoint", f"{PACKAGE}.engine.engine")
    assert misdirected("kv_cache", f"{PACKAGE}.scheduler")
    assert not misdirected("engine", f"{PACKAGE}.checkpoint.reader")
    assert not misdirected("checkpoint", f"{PACKAGE}.kv_cache.spec.KVCacheSpec")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_under_their_ceilings(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    lines = len(source.splitlines())
    assert lines <= MAX_FILE_LINES, f"{lines} lines; split the file"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            assert size <= MAX_FUNCTION_LINES, f"{node.name} has {size} lines"


@pytest.mark.parametrize("path", sorted((ROOT / "model_repository").glob("*/*/model.py")), ids=str)
def test_model_py_files_are_thin(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_MODEL_PY_LINES


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_input_is_never_checked_with_assert(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    assert not found, f"assert at lines {found}: raise an error of errors.py"


def test_errors_name_settings_with_their_environment_variables() -> None:
    files = [path for path in PACKAGE_FILES if path.name != "config.py"]
    assert [place for path in files for place in settings_named_alone(path)] == []
