"""A process that runs a desk, to be killed: `python -m tests.tinker.work.killed_desk FOLDER`.

It answers JSON lines at FOLDER/socket. Its trainer and its engine live in it and remember their
state in FOLDER/peers, which is removed for those that are lost with it."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from flotilla_tinker.types import Kind, Pending, Result
from flotilla_tinker.work.desk import Desk, open_desk
from flotilla_tinker.work.desk_errors import DeskError
from flotilla_tinker.work.limits import Limits
from tests.tinker.work.desk_doubles import JsonWire, ScriptedEngine, ScriptedTrainer, an_order

# Small, so that recovery points are made and used.
LIMITS = Limits(recovery_updates=2, free_disk_bytes=0)


async def answer(desk: Desk, asked: dict[str, Any]) -> dict[str, Any]:
    """Do what one line asks for."""
    if "session" in asked:
        return {"session": await desk.open_session("ann", {})}
    if "kind" in asked:
        order = an_order(
            Kind(asked["kind"]), asked["of"], asked["place"], asked["seq"], **asked["body"]
        )
        return {"id": (await desk.submit(order)).request_id}
    outcome = await desk.wait("ann", asked["id"], 5.0)
    if isinstance(outcome, Pending):
        return {"pending": outcome.queue_state}
    if isinstance(outcome, Result):
        return {"result": outcome.body.decode()}
    return {"failure": outcome.message}


async def main(folder: Path) -> None:
    trainer = ScriptedTrainer(memory=folder / "peers", pause_s=0.002)
    engine = ScriptedEngine(pause_s=0.004, max_num_seqs=8)
    async with open_desk(folder / "desk", trainer, engine, JsonWire(), limits=LIMITS) as desk:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while line := await reader.readline():
                try:
                    found = await answer(desk, json.loads(line))
                except DeskError as error:
                    found = {"refused": f"{type(error).__name__}: {error}"}
                writer.write(json.dumps(found).encode() + b"\n")
            writer.close()

        async with await asyncio.start_unix_server(serve, folder / "socket"):
            print("serving", flush=True)
            await desk.wait_until_broken()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
