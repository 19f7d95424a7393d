"""Names that modules of Flotilla had before each service was a package of its own.

Run specs have them in commands and keys, those of users and those in folders of runs: they are
translated where a spec is loaded. Modules of users import them: the error then names the new one.
A package of a user's own that has such a name is left alone."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flotilla_common.process.spec_commands import COMMAND_LINE, PROGRAMS
from flotilla_common.spec.function_names import FunctionName

_SERVICES = "common|env_gateway|launcher|learner|reading|rollout|tinker"
_MODULES = (
    (re.compile(r"services\.wire\b"), "flotilla_common.wire"),
    (re.compile(rf"services\.({_SERVICES})\b"), r"flotilla_\1"),
    (re.compile(r"tools\.tiny_policy\b"), "flotilla_environments.tiny_policy"),
    (re.compile(r"environments\b"), "flotilla_environments"),
)
_PATHS = (
    (re.compile(r"services/wire/"), "services/common/flotilla_common/wire/"),
    (re.compile(rf"services/({_SERVICES})/"), r"services/\1/flotilla_\1/"),
    (re.compile(r"tools/tiny_policy/"), "environments/flotilla_environments/tiny_policy/"),
    (re.compile(r"environments/"), "environments/flotilla_environments/"),
)
# Packages with a module `plugins`, which other people's modules import.
_EXTENSIBLE = ("flotilla_env_gateway", "flotilla_learner", "flotilla_reading")
_ABSENT = re.compile(r"No module named '((?:services|environments|tools)[\w.]*)'")
_IMPORT = re.compile(r"(?:from|import)\s+((?:services|environments|tools)\b[\w.]*)")


def find_new_name(module: str) -> str:
    """Return today's name of a module by its old one; "" if it is none, or there is a module of
    that name here. Nothing is imported."""
    for old, new in _MODULES:
        if found := old.match(module):
            name = f"{found.expand(new)}{module[found.end() :]}"
            return name if _is_here(name, unknown=True) and not _is_here(module) else ""
    return ""


def _is_here(module: str, *, unknown: bool = False) -> bool:
    """Return whether a module is installed or in the working directory; `unknown` if nothing is
    that has the name of its package."""
    top, *inside = module.split(".")
    found = find_spec(top)
    if found is None and unknown:
        return True
    folders = (*(found.submodule_search_locations or () if found else ()), top)
    return any(_is_module(Path(folder, *inside)) for folder in folders)


def _is_module(path: Path) -> bool:
    return path.with_suffix(".py").is_file() or any(path.glob("*.py"))


def translate_names(spec: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a spec with today's names of modules, programs and files of Flotilla, and the old ones
    that were in it, each with its new one."""
    renamed: dict[str, str] = {}
    return {key: _translate(value, key, renamed) for key, value in spec.items()}, renamed


def _translate(value: Any, key: str, renamed: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        table: Mapping[str, Any] = value
        # The keys of `modules` are services.
        return {
            name: _translate(item, key if key == "modules" else name, renamed)
            for name, item in table.items()
        }
    if isinstance(value, list):
        items: list[Any] = value
        if key == "command":
            return _translate_command(items, renamed)
        items = [_translate(item, key, renamed) for item in items]
        return _without_parts(items) if key == "needs" else items
    new = _find_new_value(key, value) if isinstance(value, str) else ""
    if new:
        renamed[value] = new
    return new or value


def _find_new_value(key: str, text: str) -> str:
    if key in ("modules", "plugins", "trusted"):
        return find_new_name(text)
    if key == "needs":
        return _find_package(text)
    if key == "verifier" and (name := FunctionName.parse(text)):
        module = "" if name.folder else find_new_name(name.module)
        return str(replace(name, module=module)) if module else ""
    is_gone = key in ("digests", "verifier") and not Path(text).exists()
    path = _find_new_path(text) if is_gone else ""
    return path if Path(path).is_file() else ""


def _translate_command(words: Sequence[Any], renamed: dict[str, str]) -> list[Any]:
    """Return a command with the new name of the module that it runs, as a command of `flotilla` if
    there is one and `python` was to run it."""
    at = words.index("-m") + 1 if "-m" in words[:-1] else 0
    new = find_new_name(words[at]) if at and isinstance(words[at], str) else ""
    if not new:
        return list(words)
    old, start = words[at], [*words[:at], new]
    named = {module: name.split() for name, module in PROGRAMS.items()} | {COMMAND_LINE: []}
    if words[:at] in (["python", "-P", "-m"], ["python", "-m"]) and new in named:
        old, start = " ".join(words[: at + 1]), ["flotilla", *named[new]]
        new = " ".join(start)
    renamed[old] = new
    return [*start, *words[at + 1 :]]


def _find_new_path(pattern: str) -> str:
    for old, new in _PATHS:
        if found := old.match(pattern):
            return f"{found.expand(new)}{pattern[found.end() :]}"
    return ""


def _find_package(pattern: str) -> str:
    """Return the package, as a need, whose files an old pattern matched; "" if other files do."""
    inside = re.search(r"/(flotilla_\w+(?:/\w+)*)/", _find_new_path(pattern))
    if inside is None or any("/flotilla_" not in str(path) for path in Path().glob(pattern)):
        return ""
    return f"package:{inside[1].replace('/', '.')}"


def _without_parts(needs: Sequence[Any]) -> list[Any]:
    """Return needs without packages inside others of them."""
    whole = tuple(f"{need}." for need in needs if str(need).startswith("package:"))
    return [need for need in dict.fromkeys(needs) if not str(need).startswith(whole)]


def explain_old_import(text: str) -> str:
    """Return what to say of a failed import, by its traceback: the new name of the module, if one
    of Flotilla's was imported by its old name, else ""."""
    absent = _ABSENT.search(text)
    if absent is None:
        return ""
    for old in reversed([*_IMPORT.findall(text)]):
        if old.startswith(absent[1]) and (new := find_new_name(old)):
            package = new.partition(".")[0]
            stable = f"; plugins import from {package}.plugins" if package in _EXTENSIBLE else ""
            return f"{old} is {new} now{stable}"
    return ""
