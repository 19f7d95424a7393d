"""Commands of run specs, and the programs that they start."""

import importlib.util
import sys

import pytest

from flotilla_common.process.spec_commands import COMMAND_LINE, PROGRAMS, resolve_command


def test_python_is_the_own_interpreter_and_a_program_of_others_is_what_it_is() -> None:
    assert resolve_command(["python", "server.py"]) == (sys.executable, "server.py")
    assert resolve_command(["npx", "-y", "a-server"]) == ("npx", "-y", "a-server")
    assert resolve_command(["bin/flotilla", "x"]) == ("bin/flotilla", "x")


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_flotilla_is_its_module_and_needs_no_command_line(name: str) -> None:
    found = resolve_command(["flotilla", *name.split(), "--port", "0"])
    assert found == (sys.executable, "-P", "-m", PROGRAMS[name], "--port", "0")
    assert importlib.util.find_spec(PROGRAMS[name]) is not None


def test_any_other_command_of_flotilla_is_one_of_its_command_line() -> None:
    for words in (["data", "prepare", "--", "x"], ["env", "try", "spec.toml"]):
        assert resolve_command(["flotilla", *words])[1:] == ("-P", "-m", COMMAND_LINE, *words)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["taks"], "no command 'taks'; did you mean `flotilla tasks`"),
        (["env_serve"], "did you mean `flotilla env serve`"),
        (["zzzz"], "no command 'zzzz'; `flotilla --help` lists them"),
        ([], "name one of its commands"),
    ],
)
def test_what_flotilla_does_not_know_is_refused_with_what_it_does(
    words: list[str], why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        resolve_command(["flotilla", *words])
