"""Modules of the user's packages that hold verifiers: imported in a process of their own, and
identified by what their sources are.

It runs in processes that verify, and imports only the standard library."""

import hashlib
import importlib
import json
import linecache
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class ModuleError(Exception):
    """A module cannot be imported, is another than it was, or lacks the function."""


def import_module(folder: str, module: str) -> ModuleType:
    """Import a module; `folder`, if any, is searched first. Raises ModuleError, with the last line
    of the traceback."""
    if folder and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    except BaseException as error:
        # Its code may raise anything, SystemExit included.
        top = module.partition(".")[0]
        absent = isinstance(error, ModuleNotFoundError) and error.name == top
        hint = (
            f"; install it in {sys.prefix}, or name its folder: FOLDER/{module}:..."
            if absent
            else ""
        )
        raise ModuleError(f"importing {module} failed: {describe_error(error)}{hint}") from error


def describe_error(error: BaseException) -> str:
    """Return the error's last line, with the place in the sources where it was raised; for an
    import of what is not there, also its line."""
    trace, place = error.__traceback__, ""
    while trace is not None:
        path = Path(trace.tb_frame.f_code.co_filename)
        # The importer's own frames are in no file.
        if path.is_file() and path != Path(__file__):
            place = f" ({path.name}, line {trace.tb_lineno})"
            if isinstance(error, ModuleNotFoundError):
                place += f": {linecache.getline(str(path), trace.tb_lineno).strip()}"
        trace = trace.tb_next
    return f"{type(error).__name__}: {error}{place}"


def unwrap_numbers(value: Any) -> Any:
    """Return a result with the numbers of numpy and torch as Python's."""
    if type(value) is dict:
        return {name: unwrap_numbers(each) for name, each in value.items()}
    item = getattr(value, "item", None)
    return item() if callable(item) else value


def digest_sources(module: ModuleType) -> str:
    """Return the SHA-256 of the module's file, with all Python files of its top package."""
    own = Path(module.__file__ or os.devnull)
    top = Path(sys.modules[module.__name__.partition(".")[0]].__file__ or "")
    whole = top.name == "__init__.py"
    root = top.parent if whole else own.parent
    digest = hashlib.sha256()
    files = {own, *(path for path in (root.rglob("*.py") if whole else ()) if path.is_file())}
    for path in sorted(files):
        digest.update(f"{os.path.relpath(path, root)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def import_checked(modules: Sequence[tuple[str, str, str]]) -> None:
    """Import modules, each (folder, module, SHA-256), before any of them verifies. Raises
    ModuleError if one is not what the gateway saw when it started: no grade would say which of the
    two gave it."""
    for folder, name, sha256 in modules:
        if digest_sources(import_module(folder, name)) != sha256:
            raise ModuleError(
                f"the sources of {name} have changed since the gateway started; start it again"
            )


def describe_function(folder: str, module: str, function: str) -> dict[str, Any]:
    """Return the SHA-256 of the sources, the version of the distribution, if one has the module,
    and what the function takes besides `env`. Raises ModuleError."""
    # Only here: workers start sooner without it.
    from inspect import Parameter, signature

    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    rest = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    imported = import_module(folder, module)
    found = getattr(imported, function, None)
    if not callable(found):
        raise ModuleError(f"{module} has no function {function!r}")
    parameters = list(signature(found).parameters.values())
    more = parameters[1:]
    if not parameters or parameters[0].kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD):
        raise ModuleError(f"{function!r} takes no `env`")
    named = {each.name for each in more if each.kind in by_name}
    needed = {each.name for each in more if each.default is each.empty and each.kind not in rest}
    if unknown := sorted(needed - (named & {"final_answer", "conversation"})):
        raise ModuleError(
            f"{function!r} needs {', '.join(unknown)}, but gets env, and final_answer and"
            " conversation if it has such parameters; give the others defaults"
        )
    takes_all = any(each.kind is Parameter.VAR_KEYWORD for each in more)
    return {
        "sha256": digest_sources(imported),
        "version": _find_version(module.partition(".")[0]),
        "takes_final_answer": takes_all or "final_answer" in named,
        "takes_conversation": takes_all or "conversation" in named,
    }


def _find_version(package: str) -> str:
    """Return the name and version of the distribution that installed the package; "" if none."""
    from importlib import metadata

    owners = metadata.packages_distributions().get(package, [])
    return f"{owners[0]} {metadata.version(owners[0])}" if owners else ""


def main() -> None:
    """Describe the function (folder, module, function) of the arguments, as the last line of
    standard output: code of the module may print."""
    try:
        answer = describe_function(*sys.argv[2:5])
    except ModuleError as error:
        answer = {"error": str(error)[:2000]}
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
