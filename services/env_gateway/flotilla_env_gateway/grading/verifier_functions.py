"""Verifiers that the operator names for environments as functions of modules: `rewards:graded`."""

import ast
import asyncio
import importlib.util
import json
import os
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

import flotilla_env_gateway
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_common.process.run_child import run_child
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.function_names import FunctionName
from flotilla_common.spec.old_names import explain_old_import
from flotilla_common.tasks.task_format import MAX_SOURCE_BYTES
from flotilla_env_gateway.config.gateway import EnvGatewayConfig
from flotilla_env_gateway.verify.verifier_source import VerifierError, VerifierFunction, find_named

_ROOT = str(Path(flotilla_env_gateway.__path__[0]).parent)
_BOOT = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from flotilla_env_gateway.verify.package_module import main; del sys.path[0]; main()"
)
# As long as a process for its verifications may take to import it.
_TIMEOUT_S = 100.0
# Loaded already, in each process for packages.
_OURS = ("flotilla", "flotilla_env_gateway")
# Imports that verifiers do without.
_REMOVED = {"fleet"}


@dataclass(frozen=True, slots=True)
class NamedVerifier:
    """A function as a verifier. `source` is what runs, and its digest identifies the verifier in
    recordings: the module's text, or for a trusted module an import with version and digest.
    `module` is what processes for it import ahead, (folder, module, SHA-256)."""

    source: str
    function: VerifierFunction
    module: tuple[str, str, str] | None = None


async def load_functions(config: EnvGatewayConfig) -> dict[str, NamedVerifier]:
    """Load the functions among `environments.KEY.verifier`, by environment: those of trusted
    modules by an import in a process of their own, all others from their source, for the sandbox.
    Raises ConfigError, with the key and the reason."""
    found: dict[str, NamedVerifier] = {}
    for env_key, name in config.functions.items():
        try:
            found[env_key] = await _load_function(
                name, trusted=config.verifiers.trusts(name.module)
            )
        except VerifierError as error:
            key = f"env_gateway.environments.{env_key}.verifier"
            raise ConfigError(f"{key}: {name}: {error}") from error
    return found


async def _load_function(name: FunctionName, *, trusted: bool) -> NamedVerifier:
    """Load one function. Raises VerifierError."""
    if name.package in _OURS:
        raise VerifierError(f"{name.package!r} is a package of Flotilla; call yours otherwise")
    if trusted:
        return await _describe_trusted(name)
    return await asyncio.to_thread(_read_sandboxed, name)


async def _describe_trusted(name: FunctionName) -> NamedVerifier:
    """Import the module in a process like those that will run it. Raises VerifierError."""
    folder = os.path.join(os.getcwd(), name.folder) if name.folder else ""
    words = ("-X", "utf8", "-c", _BOOT, _ROOT, folder, name.module, name.function)
    env = child_environment(ours=True)
    try:
        done = await run_child(python_command(*words), env=env, seconds=_TIMEOUT_S, stderr=DEVNULL)
        answer = json.loads((done.output.splitlines() or [b""])[-1])
    except TimeoutError:
        raise VerifierError(f"importing it takes more than {_TIMEOUT_S:g} s") from None
    except ValueError:
        raise VerifierError("importing it ends the process, or prints at its end") from None
    if "error" in answer:
        moved = explain_old_import(answer["error"])
        raise VerifierError("; ".join(filter(None, [answer["error"], moved])))
    sha256, version = answer.pop("sha256"), answer.pop("version")
    what = ", ".join(each for each in (version, f"SHA-256 {sha256}") if each)
    return NamedVerifier(
        f"from {name.module} import {name.function}  # {what}\n",
        VerifierFunction(name.function, packages=True, **answer),
        (folder, name.module, sha256),
    )


def _read_sandboxed(name: FunctionName) -> NamedVerifier:
    """Read the module's text without running it. Raises VerifierError, also if the sandbox lacks
    what it imports."""
    path = _find_source(name)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VerifierError(f"{path}: {error}") from error
    if len(source.encode()) > MAX_SOURCE_BYTES:
        raise VerifierError(f"{path} has more than {MAX_SOURCE_BYTES} bytes; {_trust(name)}")
    function = find_named(source, name.function)
    if absent := sorted(set(_list_imports(ast.parse(source)))):
        raise VerifierError(
            f"{path} imports {', '.join(absent)}, and the sandbox has the standard library only;"
            f" {_trust(name)}"
        )
    return NamedVerifier(source, function)


def _trust(name: FunctionName) -> str:
    return (
        f'env_gateway.verifiers.trusted = ["{name.package}"] runs it outside of the sandbox, with'
        " all packages and your rights"
    )


def _find_source(name: FunctionName) -> Path:
    """Return the file of a module, without importing the packages that it is in. Raises
    VerifierError."""
    spec: ModuleSpec | None = None
    parts = name.module.split(".")
    for number in range(len(parts)):
        inside = ".".join(parts[: number + 1])
        if number:
            spec = PathFinder.find_spec(inside, spec and spec.submodule_search_locations)
        elif name.folder:
            spec = PathFinder.find_spec(inside, [name.folder])
        else:
            spec = importlib.util.find_spec(inside)
        if spec is None:
            raise VerifierError(
                f"there is no module {inside!r} in {name.folder or sys.prefix}; install it there,"
                f" or put it beside the spec, or name its folder: FOLDER/{name.dotted}"
            )
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise VerifierError(f"the module {name.module} has no Python source; {_trust(name)}")
    return Path(spec.origin)


def _list_imports(node: ast.AST) -> Iterator[str]:
    """Yield what a source imports and the sandbox lacks, other than where it handles errors and
    for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            tops = [alias.name.partition(".")[0] for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            tops = ["." * child.level + (child.module or "").partition(".")[0]]
        else:
            tops = []
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if not for_types and not isinstance(child, ast.Try):
                yield from _list_imports(child)
        yield from (top for top in tops if top not in {*sys.stdlib_module_names, *_REMOVED})
