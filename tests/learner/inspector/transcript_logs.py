"""Transcripts of Inspect AI, read as its own viewer reads them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from inspect_ai.log import EvalLog, read_eval_log


def read_log(path: Path, *, resolve_attachments: bool = False) -> EvalLog:
    """Read a transcript in a thread of its own.

    Next to the running loop of a driven browser Inspect would patch asyncio for the whole process.
    From then on `asyncio.run` leaves its loop open, which fails a bystander."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(
            read_eval_log, str(path), resolve_attachments=resolve_attachments
        ).result()
