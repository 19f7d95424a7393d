"""Commands in run specs: what `python` and `flotilla` at their beginning stand for."""

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from flotilla_common.process.python_command import python_command

# Programs that `flotilla` starts, by the words after it. A spec's command is the module itself, so
# that there is no second process, and a machine with only a gateway and its environments will do.
PROGRAMS = {
    "tasks": "flotilla_environments.tasks",
    "gsm8k": "flotilla_environments.gsm8k",
    "fleet-booking": "flotilla_environments.fleet_booking",
    "tiny": "flotilla_environments.tiny_policy",
    "emulator": "flotilla_environments.fleet_emulator",
    "env serve": "flotilla_environments.serve",
}
COMMAND_LINE = "flotilla_launcher.cli.app"
# The first words of all other commands.
OTHER_COMMANDS = {
    *("analyze", "cancel", "chat", "data", "demo", "doctor", "dump", "env", "eval", "export"),
    *("export-trajectories", "init", "inspect", "join", "logs", "plan", "reap", "report", "runs"),
    *("scale", "serve", "sft", "show", "status", "stop", "submit", "tinker-serve", "train"),
    *("watch",),
}


def resolve_command(command: Sequence[str]) -> tuple[str, ...]:
    """Return what starts a command of a spec: `python` is this interpreter, regardless of PATH, and
    `flotilla` a program of ours, run by it. Raises ValueError if `flotilla` has no such command."""
    program, *words = command
    if program == "python":
        return (sys.executable, *words)
    if program != "flotilla":
        return tuple(command)
    for count in (1, 2):
        if module := PROGRAMS.get(" ".join(words[:count])):
            return python_command("-m", module, *words[count:])
    if not words or words[0] not in OTHER_COMMANDS:
        raise ValueError(_describe_unknown(words))
    return python_command("-m", COMMAND_LINE, *words)


def _describe_unknown(words: Sequence[str]) -> str:
    if not words:
        return "`flotilla` alone starts nothing: name one of its commands (`flotilla --help`)"
    near = get_close_matches(words[0], [*PROGRAMS, *OTHER_COMMANDS], 1)
    hint = f"did you mean `flotilla {near[0]}`?" if near else "`flotilla --help` lists them"
    return f"flotilla has no command {words[0]!r}; {hint}"
