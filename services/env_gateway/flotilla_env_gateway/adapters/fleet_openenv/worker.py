"""Worker process of one FleetTaskEnv: JSON lines on standard input, answers on standard output.

    worker.py FOLDER     (with `envs.fleet_env` in it)

It is started by path, with the fork's interpreter: this file imports nothing from this repository.
It tags instances with the episode's id as Fleet's run id, and reports that before anything can
fail, so that every instance can be found again. FleetTaskEnv's prints go to standard error."""

import asyncio
import json
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, BinaryIO

Message = dict[str, Any]


class FleetTaskEnvWorker:
    def __init__(self, report: Callable[[Message], None]) -> None:
        self._report = report
        self._env: Any = None
        self._graded: Message | None = None
        self._returned: Any = None

    async def answer_request(self, request: Message) -> Message:
        operations = {
            "open": self._open_env,
            "step": self._step_env,
            "grade": self._grade_env,
            "close": self._close_env,
        }
        try:
            return await operations[request["op"]](request)
        except Exception as error:  # noqa: BLE001
            # The gateway judges errors of the fork, by their names.
            traceback.print_exc()
            return {"error": str(error)[:2000], "kind": type(error).__name__}

    async def _open_env(self, request: Message) -> Message:
        self._tag_instances(request["tag"])
        self._note_results()
        # The gateway ends episodes, so there is no last step here.
        self._env = import_module("envs.fleet_env").FleetTaskEnv(
            request["task"], ttl_seconds=request["ttl_s"], max_steps=sys.maxsize
        )
        return {"observation": await self._env.reset_async()}

    async def _step_env(self, request: Message) -> Message:
        action = {"tool": request["tool"], "params": request["params"]}
        _, _, done, info = await self._env.step_async(action)
        return {"info": info, "done": done}

    async def _grade_env(self, request: Message) -> Message:
        """Grade once, because FleetTaskEnv reruns a failed verifier."""
        if self._graded is None:
            answer = request["answer"]
            self._env.conversation_messages = request["conversation"]
            action: Message = {"done": True}
            if answer is not None:
                action = {"tool": "submit_final_answer", "params": {"answer": answer}}
            _, reward, _, _ = await self._env.step_async(action)
            self._graded = {
                "reward": reward,
                "returned": self._returned,
                "stdout": self._env.verifier_stdout,
                "verifier_error": self._env.verifier_error,
            }
        return self._graded

    async def _close_env(self, request: Message) -> Message:
        await self._env.close_async()
        return {}

    def _tag_instances(self, tag: str) -> None:
        fleets: Any = import_module("fleet").AsyncFleet
        make = fleets.make

        async def make_tagged(fleet: Any, *arguments: Any, **keywords: Any) -> Any:
            keywords["run_id"] = tag
            instance: Any = await make(fleet, *arguments, **keywords)
            self._report(
                {
                    "instance_id": instance.instance_id,
                    "env_version": getattr(instance, "version", None) or "",
                    "data_version": getattr(instance, "data_version", None) or "",
                }
            )
            return instance

        fleets.make = make_tagged

    def _note_results(self) -> None:
        """Record the last value that a verifier returned: FleetTaskEnv does not report it if it
        gives no reward for printed results, and fails on a score returned with its checks."""
        tasks: Any = import_module("fleet._async.tasks").Task
        verify = tasks.verify_detailed_async

        async def verify_noted(task: Any, *arguments: Any, **keywords: Any) -> Any:
            response: Any = await verify(task, *arguments, **keywords)
            self._returned = response.result if response.success else None
            if isinstance(self._returned, dict):
                response.result = self._returned.get("score")
            return response

        tasks.verify_detailed_async = verify_noted


def _own_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Take standard input and output away from all other code in this process."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    return requests, answers


def main() -> None:
    # Replaces this file's own folder, whose modules would hide packages of the same names.
    sys.path[0] = sys.argv[1]
    requests, answers = _own_pipes()

    def write_message(message: Message) -> None:
        answers.write(json.dumps(message, default=str).encode() + b"\n")
        answers.flush()

    worker = FleetTaskEnvWorker(write_message)
    with asyncio.Runner() as runner:
        for line in requests:
            write_message(runner.run(worker.answer_request(json.loads(line))))


if __name__ == "__main__":
    main()
