"""Where a source file starts processes, and with which environment, read off its syntax."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ALLOWED = "child_environment"
_SUBPROCESS = {"run", "Popen", "call", "check_call", "check_output", "getoutput", "getstatusoutput"}
_ASYNCIO = {"create_subprocess_exec", "create_subprocess_shell", "subprocess_exec"}
_OS = {"fork", "forkpty", "system", "popen", "startfile"}
_OS_PREFIXES = ("exec", "spawn", "posix_spawn")
_MULTIPROCESSING = {"Process", "Pool", "get_context", "Manager"}
_ANYWHERE = {*_ASYNCIO, "ProcessPoolExecutor"}
# What may be imported of these modules without starting anything.
_HARMLESS = {"PIPE", "DEVNULL", "STDOUT", "Process", "CompletedProcess", "SubprocessError"}
_MODULES = ("subprocess", "asyncio.subprocess", "multiprocessing", "pty")


@dataclass(frozen=True, slots=True)
class Start:
    """A call that starts a process; `function` is the innermost around it."""

    line: int
    function: str
    allowed: bool


def starts(source: str) -> list[Start]:
    tree = ast.parse(source)
    return sorted(_of(tree, "<module>", tree), key=lambda start: start.line)


def _of(node: ast.AST, function: str, scope: ast.AST) -> Iterator[Start]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _of(child, child.name, child)
            continue
        if isinstance(child, ast.Call) and _starts(child.func):
            yield Start(child.lineno, function, _is_allowed(child, scope))
        if isinstance(child, ast.ImportFrom) and _hides_a_start(child):
            yield Start(child.lineno, function, False)
        yield from _of(child, function, scope)


def _starts(called: ast.expr) -> bool:
    if isinstance(called, ast.Name):
        return called.id in _ANYWHERE
    if not isinstance(called, ast.Attribute):
        return False
    name, owner = called.attr, ast.unparse(called.value)
    return (
        name in _ANYWHERE
        or (owner == "subprocess" and name in _SUBPROCESS)
        or (owner == "multiprocessing" and name in _MULTIPROCESSING)
        or (owner == "os" and (name in _OS or name.startswith(_OS_PREFIXES)))
        or (owner == "pty" and name in ("spawn", "fork"))
    )


def _hides_a_start(node: ast.ImportFrom) -> bool:
    """Of `from subprocess import run` no call could be recognised."""
    if node.module == "os":
        return any(each.name in _OS or each.name.startswith(_OS_PREFIXES) for each in node.names)
    return node.module in _MODULES and any(each.name not in _HARMLESS for each in node.names)


def _is_allowed(call: ast.Call, scope: ast.AST) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "env"]
    if ast.unparse(call.func) == "os.execve":
        given = [call.args[2]]
    if len(given) != 1:
        return False
    environment = given[0]
    if isinstance(environment, ast.Dict) and not environment.keys:
        return True
    parts = [environment, *_assigned(environment, scope)]
    text = " ".join(ast.unparse(part) for part in parts)
    made = any(_is_made(node) for part in parts for node in ast.walk(part))
    return made and "os.environ" not in text


def _assigned(environment: ast.expr, scope: ast.AST) -> list[ast.expr]:
    """What the names in an expression were set to in the same function."""
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
