"""Subprocesses for probes that block: a deadline can end a process."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flotilla_common.process import python_command
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.run_child import run_child
from flotilla_common.text.printable_text import print_json
from flotilla_launcher.doctor.findings import Finding, Status, fail, last_line


async def run_command(
    command: Sequence[str],
    given: bytes,
    environ: Mapping[str, str],
    also: Sequence[str] = (),
) -> tuple[int, str, str]:
    """Run a command and return its exit code, output and errors. It inherits, from `environ`, the
    variables of every process of ours and those in `also`."""
    env = child_environment(*also, ours=True, environ=environ)
    done = await run_child(command, given, env=env)
    return done.code, done.output.decode(errors="replace"), done.errors.decode(errors="replace")


class ScriptError(Exception):
    """A script failed; the message states its exit code and last line."""


async def run_script(
    script: str,
    question: Any,
    environ: Mapping[str, str],
    python: str | None = None,
) -> Any:
    """Run a script that reads a question from standard input and prints its answer, both as JSON;
    return the answer. Raises ScriptError."""
    command = python_command.python_command("-c", script, executable=python)
    code, output, errors = await run_command(command, json.dumps(question).encode(), environ)
    if code != 0:
        raise ScriptError(f"ended with code {code}: {last_line(errors)}")
    return json.loads(output.strip().splitlines()[-1])


async def run_probe_module(
    python: str,
    module: str,
    question: Mapping[str, Any],
    environ: Mapping[str, str],
    also: Sequence[str] = (),
) -> list[Finding]:
    """Run a probe's module, which calls `answer_question`, in another process; return its
    findings."""
    command = python_command.python_command("-m", module, executable=python)
    given = json.dumps(question).encode()
    code, output, errors = await run_command(command, given, environ, also=also)
    try:
        pairs = json.loads(output.strip().splitlines()[-1])
        return [Finding(Status(status), detail) for status, detail in pairs]
    except (ValueError, IndexError, TypeError):
        last = last_line(errors) or "it printed nothing"
        what = f"{' '.join(command)} ended with code {code}: {last}"
        return [fail(what, "run it by hand, in an environment rebuilt by `make`")]


def answer_question(probe: Callable[[Mapping[str, Any]], list[Finding]]) -> None:
    """Answer the parent process: read the question from standard input, write the findings to
    standard output."""
    findings = probe(json.load(sys.stdin))
    print_json([[finding.status.value, finding.detail] for finding in findings])
