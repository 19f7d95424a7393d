"""Search for the verifier function in a source, cached and without blocking the event loop."""

import asyncio
import hashlib
import json
import sys
from asyncio.subprocess import DEVNULL
from pathlib import Path

import flotilla_common
import flotilla_env_gateway
from flotilla_common.aio.bounded_dict import BoundedDict
from flotilla_common.process.run_child import run_child
from flotilla_common.tasks.task_format import MAX_SOURCE_BYTES
from flotilla_env_gateway.verify.verifier_source import (
    VerifierError,
    VerifierFunction,
    find_verifier,
)

_ROOTS = [str(Path(each.__path__[0]).parent) for each in (flotilla_env_gateway, flotilla_common)]
_BOOT = (
    "import sys; sys.path[:0] = sys.argv[1:]; "
    "from flotilla_env_gateway.verify.verifier_source import main; main()"
)
_COMMAND = (sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", _BOOT, *_ROOTS)
# Python's parser takes up to 3 ms per KiB, and blocks the whole process meanwhile.
_HERE_BYTES = 2**12
_KEPT = 4096
_PROCESSES = 2
_TIMEOUT_S = 20.0


class VerifierFinder:
    """Finds verifier functions and caches the results by digest. A longer source is parsed in
    a process of its own: the parser can be made to take long, and even in a thread it would
    block the event loop."""

    def __init__(self) -> None:
        self._known: BoundedDict[bytes, VerifierFunction | str] = BoundedDict(_KEPT)
        self._places = asyncio.Semaphore(_PROCESSES)

    async def find_function(self, source: str) -> VerifierFunction:
        """Find the verifier function of a source. Raises VerifierError."""
        data = source.encode("utf-8", "replace")
        if len(data) > MAX_SOURCE_BYTES:
            raise VerifierError(f"the verifier has {len(data)} bytes, more than {MAX_SOURCE_BYTES}")
        digest = hashlib.sha256(data).digest()
        found = self._known.get(digest)
        if found is None:
            async with self._places:
                found = self._known.get(digest) or await _look_up(source, data)
            self._known[digest] = found
        if isinstance(found, str):
            raise VerifierError(found)
        return found


async def _look_up(source: str, data: bytes) -> VerifierFunction | str:
    """Return the function, or the reason for having none."""
    if len(data) > _HERE_BYTES:
        return await _look_up_in_process(data)
    try:
        return find_verifier(source)
    except VerifierError as error:
        return str(error)


async def _look_up_in_process(data: bytes) -> VerifierFunction | str:
    try:
        done = await run_child(
            _COMMAND, data, env={}, seconds=_TIMEOUT_S, stderr=DEVNULL, folder=Path("/")
        )
    except TimeoutError:
        return f"the verifier does not compile within {_TIMEOUT_S:g} s"
    if done.code:
        return "the verifier does not compile: it takes too much time or memory"
    answer = json.loads(done.output)
    return answer["error"] if "error" in answer else VerifierFunction(**answer)
