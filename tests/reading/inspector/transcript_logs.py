"""Transcripts for Inspect AI: written in this process, and read as Inspect reads them."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from inspect_ai.log import EvalLog


def write_here(run: Path, to: Path, *what: str) -> int:
    """Run the program that writes a transcript in a thread of its own; return its exit code."""
    # Every worker imports all tests: Inspect is imported where it is used.
    from flotilla_reading.inspector import transcript_command

    arguments = ["--run", str(run), *what, "--to", str(to)]
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as pool:
        # A process cannot take its low priority back.
        patch.setattr(os, "nice", lambda _: 0)
        return pool.submit(transcript_command.main, arguments).result()


def read_log(path: Path, *, resolve_attachments: bool = False) -> "EvalLog":
    """Read a transcript in a thread of its own.

    Next to the running loop of a driven browser Inspect would patch asyncio for the whole process.
    From then on `asyncio.run` leaves its loop open, which fails a bystander."""
    from inspect_ai.log import read_eval_log

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            read_eval_log, str(path), resolve_attachments=resolve_attachments
        ).result()
