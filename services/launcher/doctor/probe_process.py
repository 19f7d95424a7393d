"""Subprocesses for probes that block: a deadline can end a process."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from services.common import python_command
from services.common.child_environment import child_environment
from services.common.printable_text import say_json
from services.launcher.doctor.findings import Finding, Status, fail, first_line


async def run_command(
    command: Sequence[str],
    given: bytes,
    environ: Mapping[str, str],
    handed: Sequence[int] = (),
    also: Sequence[str] = (),
) -> tuple[int, str, str]:
    """Run a command and return its exit code, output and errors. It gets the descriptors in
    `handed` and, of `environ`, what every process of ours gets and what `also` names. On
    cancellation its whole process group is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=child_environment(*also, ours=True, environ=environ),
        pass_fds=handed,
        start_new_session=True,
    )
    try:
        output, errors = await process.communicate(given)
    finally:
        with suppress(ProcessLookupError):
            # Also what a probe that answered has left behind.
            os.killpg(process.pid, signal.SIGKILL)
        code = await process.wait()
    return code, output.decode(errors="replace"), errors.decode(errors="replace")


async def run_probe_module(
    python: str,
    module: str,
    question: Mapping[str, Any],
    environ: Mapping[str, str],
    also: Sequence[str] = (),
) -> list[Finding]:
    """Run a probe's module in another process, where it calls `answer_question`, and return its
    findings."""
    command = python_command.python_command("-m", module, executable=python)
    given = json.dumps(question).encode()
    code, output, errors = await run_command(command, given, environ, also=also)
    try:
        pairs = json.loads(output.strip().splitlines()[-1])
        return [Finding(Status(status), detail) for status, detail in pairs]
    except (ValueError, IndexError, TypeError):
        last = first_line("\n".join(reversed(errors.strip().splitlines())))
        what = f"{' '.join(command)} ended with code {code}: {last or 'it said nothing'}"
        return [fail(what, "see whether it runs by hand, in an environment made anew by `make`")]


def answer_question(probe: Callable[[Mapping[str, Any]], list[Finding]]) -> None:
    """Answer the parent process: read the question from standard input, write the findings to
    standard output."""
    findings = probe(json.load(sys.stdin))
    say_json([[finding.status.value, finding.detail] for finding in findings])
