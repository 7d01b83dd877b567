"""The house has four rooms and imports go one way: flows -> tasks -> resources -> configs."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("flows", "tasks", "resources", "configs")
MAY_IMPORT = {
    "flows": {"flows", "tasks", "resources", "configs"},
    "tasks": {"tasks", "resources", "configs"},
    "resources": {"resources", "configs"},
    "configs": {"configs"},
}
PURE_FOLDERS = ("tasks/algorithms", "tasks/rewards")
FORBIDDEN_LIBRARIES = {
    "configs": {"torch", "ray", "vllm", "prefect", "tensordict", "transformers"},
    "resources": {"prefect", "prefect_ray"},
    "tasks/algorithms": {"ray", "prefect", "vllm"},
    "tasks/rewards": {"ray", "prefect", "vllm", "torch"},
}
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
VAGUE_NAMES = {"utils.py", "common.py", "helpers.py", "misc.py"}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imports_of(path: Path) -> list[tuple[int, str]]:
    """(line, module) of every import in a file, those inside functions and `if TYPE_CHECKING` too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append((node.lineno, node.module))
    return found


def breaches(path: Path, source_room: str, root: Path = ROOT) -> list[str]:
    name = path.relative_to(root).as_posix()
    wrong = []
    for line, module in imports_of(path):
        top = module.split(".")[0]
        if top in ROOMS and top not in MAY_IMPORT[source_room]:
            wrong.append(f"{name}:{line} imports {module}")
        for folder, libraries in FORBIDDEN_LIBRARIES.items():
            if name.startswith(folder + "/") and top in libraries:
                wrong.append(f"{name}:{line} imports {module}")
        if any(name.startswith(folder + "/") for folder in PURE_FOLDERS):
            own = name.rsplit("/", 1)[0].replace("/", ".")
            if top in ROOMS and not module.startswith(own):
                wrong.append(f"{name}:{line} imports {module}")
    return wrong


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room: str):
    wrong = [line for path in python_files(room) for line in breaches(path, room)]
    assert not wrong, "\n".join(wrong)


def test_an_import_against_the_direction_is_found(tmp_path: Path):
    (tmp_path / "configs").mkdir()
    bad = tmp_path / "configs" / "bad.py"
    bad.write_text("def f():\n    import torch\n    from tasks import step\n")
    assert sorted(breaches(bad, "configs", root=tmp_path)) == [
        "configs/bad.py:2 imports torch",
        "configs/bad.py:3 imports tasks",
    ]


def test_vllm_is_imported_in_one_file():
    users = {
        path.relative_to(ROOT).as_posix()
        for path in python_files(*ROOMS)
        for _, module in imports_of(path)
        if module.split(".")[0] == "vllm"
    }
    assert users <= {"resources/engines/vllm.py"}


@pytest.mark.parametrize("room", ROOMS)
def test_every_init_file_is_empty(room: str):
    full = [path for path in python_files(room) if path.name == "__init__.py" and path.read_text().strip()]
    assert not full


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_files_and_functions_stay_short():
    too_long = []
    for path in python_files(*ROOMS, "benchmarks", "tests"):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        if len(text.splitlines()) > MAX_FILE_LINES:
            too_long.append(f"{name}: {len(text.splitlines())} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(
                        f"{name}:{node.lineno} {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
                    )
    assert not too_long, "\n".join(too_long)


def test_no_file_has_a_vague_name():
    vague = [path for path in python_files(*ROOMS, "benchmarks") if path.name in VAGUE_NAMES]
    assert not vague


def test_tests_use_no_mocks():
    users = [
        path for path in python_files("tests") for _, module in imports_of(path) if module.startswith("unittest.mock")
    ]
    assert not users


def test_flow_files_are_not_named_like_a_module():
    """Prefect puts flows/ first on sys.path, so a file there must not hide a module that something imports."""
    import sys

    names = {path.stem for path in (ROOT / "flows").glob("*.py")} - {"__init__"}
    taken = {name for name in names if name in sys.stdlib_module_names or name in ROOMS}
    assert not taken
