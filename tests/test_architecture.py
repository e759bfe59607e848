"""The map of the house: who may import whom, how long files and functions may be, who may print."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "moebatch"
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
SCRIPT = "moebatch.demo.train"  # stands alone: it makes the demo model, nothing imports it

# Longest prefix wins, on both sides. A part may always import itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "moebatch": (),
    "moebatch.__main__": ("moebatch",),
    "moebatch.errors": (),
    "moebatch.units": ("moebatch.errors",),
    "moebatch.plan": ("moebatch.errors", "moebatch.units"),
    "moebatch.data": ("moebatch.errors", "moebatch.units"),
    "moebatch.native": ("moebatch.errors",),
    "moebatch.model": (
        "moebatch.plan.model_spec",
        "moebatch.errors",
        "moebatch.units",
        "moebatch.native",
    ),
    "moebatch.runtime": (
        "moebatch.plan",
        "moebatch.model",
        "moebatch.native",
        "moebatch.errors",
        "moebatch.units",
        "moebatch.data.requests",
    ),
    "moebatch.report": ("moebatch.plan", "moebatch.data.requests", "moebatch.units"),
    "moebatch.cli": ("moebatch",),
    SCRIPT: ("moebatch",),
}
HEAVY = {
    "torch",
    "pyarrow",
    "datasets",
    "tokenizers",
    "transformers",
    "huggingface_hub",
    "jinja2",
    "sentencepiece",
}
LIGHT = ("plan", "data", "cli", "report", "errors", "units", "__init__", "__main__",
         "model.__init__", "model.families", "model.resolve", "model.checkpoint", "model.direct_io",
         "model.stored", "model.identity", "native.__init__", "native.extension")  # fmt: skip


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in sorted(ROOT.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def within(name: str, part: str) -> bool:
    return name == part or name.startswith(part + ".")


def imported(tree: ast.AST, module: str) -> set[str]:
    """Names of modules that a tree imports, wherever in the file; relative ones made absolute."""
    found: set[str] = set()
    package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) + 1 - node.level]
                base = ".".join([*above, base] if base else above)
            submodules = {f"{base}.{alias.name}" for alias in node.names} & set(FILES)
            found |= submodules or {base}
            if submodules and len(submodules) < len(node.names):
                found.add(base)
    return found


EDGES = {
    name: {target for target in imported(tree, name) if within(target, "moebatch")} - {name}
    for name, tree in TREES.items()
}


def at_module_level(tree: ast.Module) -> ast.Module:
    """The tree without its functions and without blocks for type checkers only."""

    class Outside(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
            return None

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node: ast.If) -> ast.AST | None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                return None
            return self.generic_visit(node)

    return Outside().visit(ast.parse(ast.unparse(tree)))


def rule_for(name: str) -> str:
    return max((part for part in ALLOWED if within(name, part)), key=len)


@pytest.mark.parametrize("name", list(FILES))
def test_imports_go_only_where_the_map_allows(name) -> None:
    part = rule_for(name)
    assert name == "moebatch" or part != "moebatch", f"{name} has no room in the map"
    wrong = {
        target
        for target in EDGES[name]
        if target != "moebatch"  # the version
        and not within(target, part)
        and not any(within(target, allowed) for allowed in ALLOWED[part])
    }
    assert wrong == set()


def test_imported_modules_exist() -> None:
    for name, targets in EDGES.items():
        assert targets <= set(FILES), name


def test_no_cycle() -> None:
    """None hidden in a function either."""
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(EDGES[name] - {"moebatch"}):
                visit(target, (*path, name))
            done.add(name)

    assert not EDGES["moebatch"]
    for name in FILES:
        visit(name, ())


@pytest.mark.parametrize("name", [n for n in FILES if n != SCRIPT])
def test_nothing_imports_the_script(name) -> None:
    assert SCRIPT not in EDGES[name]


def is_light(name: str) -> bool:
    inner = name.removeprefix("moebatch").removeprefix(".") or "__init__"
    return any(within(inner, part) for part in LIGHT) or name == "moebatch.model"


@pytest.mark.parametrize("name", [n for n in FILES if is_light(n)])
def test_no_heavy_library_at_module_level(name) -> None:
    outside = imported(at_module_level(TREES[name]), name)
    assert {target.partition(".")[0] for target in outside} & HEAVY == set()
    # Nor by way of a module of ours that is not light itself.
    assert {
        target for target in outside if within(target, "moebatch") and not is_light(target)
    } == set()


@pytest.mark.parametrize("name", [n for n in FILES if within(n, "moebatch.plan")])
def test_plan_knows_no_tensors_at_all(name) -> None:
    roots = {target.partition(".")[0] for target in imported(TREES[name], name)}
    assert roots - {"moebatch", "numpy"} <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    "modules",
    [
        "moebatch, moebatch.plan.optimizer, moebatch.model.resolve, moebatch.report",
        "moebatch.cli.app",
    ],
)
def test_planning_loads_no_heavy_library(modules) -> None:
    if "cli" in modules and "moebatch.cli.app" not in FILES:
        pytest.skip("there is no command line yet")
    program = f"import sys, {modules}; print(*(set({sorted(HEAVY)!r}) & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def length_of(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str) -> int:
    """Lines of a function; of a command its body, since its parameters are the list of options."""
    parameters = [*node.args.args, *node.args.kwonlyargs]
    is_command = within(name, "moebatch.cli") and parameters and all(
        isinstance(p.annotation, ast.Attribute) and ast.unparse(p.annotation).startswith("opt.")
        for p in parameters
    )  # fmt: skip
    return node.end_lineno - (node.body[0].lineno if is_command else node.lineno) + 1


@pytest.mark.parametrize(
    "name",
    [name for name in FILES if name != SCRIPT],  # a training run is read as one file
)
def test_files_are_short(name) -> None:
    assert FILES[name].read_text().count("\n") <= MAX_FILE_LINES


@pytest.mark.parametrize("name", list(FILES))
def test_functions_are_short(name) -> None:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = length_of(node, name)
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("name", list(FILES))
def test_only_the_command_line_prints(name) -> None:
    if within(name, "moebatch.cli") or name == SCRIPT:
        return
    calls = [
        node.lineno
        for node in ast.walk(TREES[name])
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert calls == []


@pytest.mark.parametrize("name", list(FILES))
def test_every_module_says_what_it_is(name) -> None:
    assert ast.get_docstring(TREES[name])
