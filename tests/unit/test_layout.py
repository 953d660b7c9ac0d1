"""The rules of the house that a file's name or place decides, checked on the source."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("services", "scheduler_svc", "kv_store", "gpu_worker", "kernels")
MAX_FUNCTION_LINES = 70

IMPURE = {
    "aiohttp",
    "asyncio",
    "gpu_worker",
    "kernels",
    "logging",
    "nats",
    "os",
    "random",
    "secrets",
    "socket",
    "structlog",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
}
"""What a pure module may not import."""

SHELLS = {"__main__.py", "service.py", "shell.py"}
"""Files of a package with a core that are not pure."""

PURE_FILES = {"core.py", "policy.py", "sequence.py", "block_pool.py", "restarts.py", "problem.py"}
"""Files that are pure wherever they are."""

NEVER_IMPORTED = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml", "jinja2")
}
NEVER_CALLED = {
    *("eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load"),
    *("os.system", "os.popen", "asyncio.create_subprocess_shell"),
}
NEVER_GIVEN = {"trust_remote_code", "allow_pickle", "shell"}
"""Arguments that turn data into code."""


@cache
def _sources() -> tuple[Path, ...]:
    return tuple(sorted(p for name in PACKAGES for p in (ROOT / name).rglob("*.py")))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every absolute import outside `if TYPE_CHECKING`."""
    skipped = {
        id(child)
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    for node in ast.walk(_tree(path)):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def _is_pure(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    if parts[:2] == ("services", "contracts"):
        return True
    if parts[0] in {"scheduler_svc", "kv_store"}:
        return path.name not in SHELLS
    return path.name in PURE_FILES


def _found(problems: list[str]) -> str:
    return "\n" + "\n".join(problems)


def test_pure_modules_import_nothing_impure() -> None:
    problems = [
        f"{_name(path)}:{line}: imports {name}"
        for path in filter(_is_pure, _sources())
        for line, name in _imports(path)
        if name.split(".")[0] in IMPURE
    ]
    assert not problems, _found(problems)


def test_torch_is_known_to_worker_and_kernels_alone() -> None:
    problems = [
        f"{_name(path)}:{line}: imports {name}"
        for path in _sources()
        if path.relative_to(ROOT).parts[0] not in {"gpu_worker", "kernels"}
        for line, name in _imports(path)
        if name.split(".")[0] in {"torch", "kernels", "triton"}
    ]
    assert not problems, _found(problems)


def _runs_data(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and reason of everything that could make code of data."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case ast.Call():
                if ast.unparse(node.func) in NEVER_CALLED:
                    yield node.lineno, f"calls {ast.unparse(node.func)}"
                given = {argument.arg for argument in node.keywords} & NEVER_GIVEN
                yield from ((node.lineno, f"gives {name}") for name in given)
                continue
            case _:
                continue
        for name in modules:
            if name.split(".")[0] in NEVER_IMPORTED:
                yield node.lineno, f"imports {name}"


def test_s01_nothing_runs_code_from_data() -> None:
    problems = [
        f"{_name(path)}:{line}: {reason}"
        for path in _sources()
        for line, reason in _runs_data(_tree(path))
    ]
    assert not problems, _found(problems)


@pytest.mark.parametrize(
    "code",
    [
        *("import pickle", "import dill as d", "from cloudpickle import loads", "import marshal"),
        *("def f():\n    import shelve", "from yaml import load", "eval('1')", "exec(code)"),
        *("torch.load(path)", "f(trust_remote_code=True)", "np.load(p, allow_pickle=True)"),
        *("subprocess.run(c, shell=True)", "os.system(c)", "__import__(name)", "if x:\n  eval(y)"),
    ],
)
def test_s01_the_gate_can_close(code: str) -> None:
    assert list(_runs_data(ast.parse(code)))


def test_our_environment_names_are_read_in_one_file() -> None:
    problems = [
        _name(path)
        for path in _sources()
        if _name(path) != "services/runtime/settings.py"
        and re.search(r"(environ\b|getenv).{0,40}STREETCAR_", path.read_text())
    ]
    assert not problems, _found(problems)


def test_the_client_can_be_copied() -> None:
    path = ROOT / "services/client.py"
    allowed = sys.stdlib_module_names | {"nats", "msgpack"}
    problems = [
        f"{_name(path)}:{line}: imports {name}"
        for line, name in _imports(path)
        if name.split(".")[0] not in allowed
    ]
    assert not problems, _found(problems)


def test_every_module_says_what_it_is() -> None:
    problems = []
    for path in _sources():
        text = ast.get_docstring(_tree(path)) or ""
        if path.name == "__init__.py":
            continue
        if not text:
            problems.append(f"{_name(path)}: no docstring")
        elif not re.search(r"^(Pure|Shell|Device)\b", text, re.M):
            problems.append(f"{_name(path)}: docstring has no Pure, Shell or Device line")
    assert not problems, _found(problems)


def test_functions_fit_on_a_screen() -> None:
    """A command's parameters and docstring are its manual; only its body counts."""
    problems = []
    for path in _sources():
        for node in ast.walk(_tree(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            if lines > MAX_FUNCTION_LINES:
                problems.append(f"{_name(path)}:{node.lineno}: {node.name} has {lines} lines")
    assert not problems, _found(problems)


@pytest.mark.parametrize("kind", ["handler", "print"])
def test_library_code_neither_swallows_nor_prints(kind: str) -> None:
    problems = []
    for path in _sources():
        for node in ast.walk(_tree(path)):
            bare = isinstance(node, ast.ExceptHandler) and node.type is None
            prints = (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) == "print"
                and "cli" not in path.parts
            )
            if (bare and kind == "handler") or (prints and kind == "print"):
                problems.append(f"{_name(path)}:{node.lineno}")
    assert not problems, _found(problems)


def test_every_kernel_has_a_test_of_its_name() -> None:
    for folder in ("kernels", "kernels/gpu"):
        operations = {
            path.stem if path.is_file() else path.name
            for path in (ROOT / folder).iterdir()
            if not path.name.startswith("_") and (path.suffix == ".py" or path.is_dir())
        } - {"gpu"}
        tested = {
            path.stem.removeprefix("test_") for path in (ROOT / "tests" / folder).glob("*.py")
        }
        assert operations, f"nothing found in {folder}"
        assert operations <= tested, f"{folder} without a test: {sorted(operations - tested)}"
