"""Detection of the verifier among the functions of its source, without running it. For a long
untrusted source this runs in a separate process."""

import ast
import resource
import sys
import warnings
from dataclasses import asdict, dataclass
from typing import Any

from flotilla_common.text.printable_text import one_line, print_json

_LINE_CHARS = 120
# A syntax tree takes some hundred times the bytes of its source.
_MEMORY_BYTES, _CPU_S = 2**30, 5


class VerifierError(ValueError):
    """The source holds no function that could be a verifier."""


@dataclass(frozen=True, slots=True)
class VerifierFunction:
    """A verifier's name and what it takes besides `env`. With `packages` it needs what is installed
    beside Flotilla, and the operator trusts it."""

    name: str
    takes_final_answer: bool
    takes_conversation: bool
    takes_metadata: bool = False
    packages: bool = False

    def choose_arguments(
        self, final_answer: str | None, conversation: str | None, metadata: Any
    ) -> dict[str, Any]:
        """Return the arguments of a call besides `env`."""
        answer = {"final_answer": final_answer} if self.takes_final_answer else {}
        told = {"conversation": conversation} if self.takes_conversation else {}
        return answer | told | ({"metadata": metadata} if self.takes_metadata else {})


def find_verifier(source: str) -> VerifierFunction:
    """Find the verifier among the functions of `source`, by its shape rather than its name.

    It is the one decorated with `verifier`, else the first whose first parameter is `env`,
    else the first. Raises VerifierError."""
    functions = _parse_functions(source)
    if not functions:
        raise VerifierError("the verifier defines no function")
    function = min(functions, key=_rank_function)
    if isinstance(function, ast.AsyncFunctionDef):
        raise VerifierError(f"the verifier {function.name!r} is async; only plain functions run")
    return _describe_function(function)


def find_named(source: str, name: str) -> VerifierFunction:
    """Find the function `name` of a module's source, plain or async. Raises VerifierError."""
    functions = {function.name: function for function in _parse_functions(source)}
    if name not in functions:
        known = ", ".join(functions) or "none"
        raise VerifierError(f"it defines no function {name!r}; those at its top level: {known}")
    return _describe_function(functions[name])


def _describe_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> VerifierFunction:
    names = {a.arg for a in [*function.args.args, *function.args.kwonlyargs]}
    takes_all = function.args.kwarg is not None
    return VerifierFunction(
        function.name,
        takes_final_answer=takes_all or "final_answer" in names,
        takes_conversation=takes_all or "conversation" in names,
        # Fleet's verifiers that take everything expect nothing else.
        takes_metadata="metadata" in names,
    )


def main() -> None:
    """Report on the source on standard input, as JSON on standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_S, _CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The sender checks its length.
    source = sys.stdin.buffer.read().decode("utf-8", "replace")
    try:
        answer = asdict(find_verifier(source))
    except VerifierError as error:
        answer = {"error": str(error)[:1000]}
    print_json(answer)


def _parse_functions(source: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    try:
        with warnings.catch_warnings():
            # They would be printed, each with a line of the source.
            warnings.simplefilter("ignore")
            body = ast.parse(source).body
    except SyntaxError as error:
        raise VerifierError(
            f"the verifier does not compile: {_locate_error(error, source)}"
        ) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"the verifier does not compile: {error}") from None
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def _locate_error(error: SyntaxError, source: str) -> str:
    """Return the error, its position, and the line itself."""
    lines = source.splitlines()
    if not error.lineno or error.lineno > len(lines):
        return error.msg
    line = one_line(lines[error.lineno - 1], _LINE_CHARS)
    return f"{error.msg}, in line {error.lineno}: {line}"


def _rank_function(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    if any(_is_verifier(decorator) for decorator in function.decorator_list):
        return 0
    first = [*function.args.posonlyargs, *function.args.args][:1]
    return 1 if first and first[0].arg == "env" else 2


def _is_verifier(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return "verifier" in name
