"""Copies of a staged publication on all machines of an engine, kept while it is loaded."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from flotilla_rollout.adapters.engine_machines import EngineMachines
from flotilla_rollout.ports import TransportFailed
from flotilla_rollout.types import Publication

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


@asynccontextmanager
async def file_on_machines(
    llm: "AsyncLLM", publication: Publication, path: Path, machines: EngineMachines | None
) -> AsyncGenerator[None]:
    """Keep the publication's file on every machine while the block runs.

    Raises TransportFailed, with nothing changed. Does nothing for an engine of one machine."""
    if machines is None:
        yield
        return
    checks = [
        (entry.name, entry.offset_bytes, entry.size_bytes, entry.checksum)
        for entry in publication.manifest
    ]
    args = (str(path), publication.total_bytes, checks)
    reasons: list[str] = await llm.collective_rpc("copy_flotilla_file", args=args)
    answers = True
    try:
        if why := next((each for each in reasons if each), ""):
            raise TransportFailed(f"{publication.policy.label} did not reach all machines: {why}")
        yield
    except asyncio.CancelledError:
        # The engine is given up: the copies go with its machines' folders.
        answers = False
        raise
    finally:
        if answers:
            await llm.collective_rpc("drop_flotilla_copy")
