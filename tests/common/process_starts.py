"""Starts of processes in a source file, and their environments, read off its syntax."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

ALLOWED = "child_environment"
_STARTS = {
    "subprocess": (
        *("run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"),
    ),
    "os": ("fork", "forkpty", "system", "popen", "startfile"),
    "pty": ("spawn", "fork"),
    "psutil": ("Popen",),
}
_OS_PREFIXES = ("exec", "spawn", "posix_spawn")
# Of any module or object.
_ANYWHERE = {
    *("create_subprocess_exec", "create_subprocess_shell", "subprocess_exec", "subprocess_shell"),
    *("ProcessPoolExecutor", "fork_exec"),
    # Ours.
    "run_child",
}
# All of it starts processes, torch's as Python's own, but for this.
_MULTIPROCESSING = "multiprocessing"
_TELLS = {"active_children", "cpu_count", "current_process", "set_executable"}
# Names that may be imported from these modules: calls of others could not be recognised.
_HARMLESS = {
    "subprocess": {
        *("PIPE", "DEVNULL", "STDOUT", "CompletedProcess", "SubprocessError"),
        *("TimeoutExpired", "CalledProcessError"),
    },
    "asyncio.subprocess": {"PIPE", "DEVNULL", "STDOUT", "Process"},
    "pty": set[str](),
}


@dataclass(frozen=True, slots=True)
class Start:
    """A use of a function that starts a process; `function` is the innermost around it."""

    line: int
    function: str
    allowed: bool


def starts(source: str) -> list[Start]:
    tree = ast.parse(source)
    found = _Search(_full_names(tree)).within(tree, "<module>", tree)
    return sorted(found, key=lambda start: start.line)


def _full_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a file imports."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {each.asname: each.name for each in node.names if each.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return names


@dataclass
class _Search:
    full_names: dict[str, str]
    # Uses that have been judged by the call around them.
    judged: set[ast.AST] = field(default_factory=set[ast.AST])

    def within(self, node: ast.AST, function: str, scope: ast.AST) -> Iterator[Start]:
        for child in _run(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from self.within(child, child.name, child)
                continue
            yield from self._at(child, function, scope)
            yield from self.within(child, function, scope)

    def _at(self, node: ast.AST, function: str, scope: ast.AST) -> Iterator[Start]:
        if isinstance(node, ast.ImportFrom) and _hides_a_start(node):
            yield Start(node.lineno, function, False)
        elif isinstance(node, ast.Call):
            # As an argument too: `to_thread(subprocess.run, ..., env=...)`.
            uses = [each for each in (node.func, *node.args) if self._starts(each)]
            self.judged.update(part for use in uses for part in ast.walk(use))
            if uses:
                yield Start(node.lineno, function, self._is_allowed(node, scope))
        elif isinstance(node, ast.expr) and node not in self.judged and self._starts(node):
            self.judged.update(ast.walk(node))
            yield Start(node.lineno, function, False)

    def _starts(self, node: ast.expr) -> bool:
        owner, _, name = self._full(node).rpartition(".")
        if name in _ANYWHERE:
            return True
        if _MULTIPROCESSING in owner.split("."):
            return name not in _TELLS
        return name in _STARTS.get(owner, ()) or (owner == "os" and name.startswith(_OS_PREFIXES))

    def _full(self, node: ast.expr) -> str:
        """Return the name with its modules; empty for an expression that is no name."""
        if isinstance(node, ast.Name):
            return self.full_names.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self._full(node.value)}.{node.attr}"
        return ""

    def _is_allowed(self, call: ast.Call, scope: ast.AST) -> bool:
        given = [keyword.value for keyword in call.keywords if keyword.arg == "env"]
        if self._full(call.func) == "os.execve":
            given = [call.args[2]]
        if len(given) != 1:
            return False
        environment = given[0]
        if isinstance(environment, ast.Dict) and not environment.keys:
            return True
        parts = [environment, *_assigned(environment, scope)]
        return any(_is_made(node) for part in parts for node in ast.walk(part)) and not any(
            self._is_whole(node) for node in ast.walk(scope)
        )

    def _is_whole(self, node: ast.AST) -> bool:
        """Return True for this process's environment, with which a function could still fill one
        that it made for a child."""
        return isinstance(node, ast.Name | ast.Attribute) and self._full(node) == "os.environ"


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """Return the children of a node except annotations, which start nothing."""
    reported = (getattr(node, "annotation", None), getattr(node, "returns", None))
    return (child for child in ast.iter_child_nodes(node) if child not in reported)


def _hides_a_start(node: ast.ImportFrom) -> bool:
    """Return True if calls could not be recognised, as after `from subprocess import run`."""
    module, names = node.module or "", {each.name for each in node.names}
    if module == "os":
        return any(name in _STARTS["os"] or name.startswith(_OS_PREFIXES) for name in names)
    if _MULTIPROCESSING in module.split("."):
        return bool(names - _TELLS)
    return bool(names - _HARMLESS.get(module, names))


def _assigned(environment: ast.expr, scope: ast.AST) -> list[ast.expr]:
    """Return what the names in an expression were set to in the same function."""
    names = {node.id for node in ast.walk(environment) if isinstance(node, ast.Name)}
    return [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id in names for target in node.targets)
    ]


def _is_made(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == ALLOWED
    )
