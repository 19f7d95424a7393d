"""Faults that can be injected, and the effect of those in force on one request. Pure."""

import random
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flotilla_environments.fleet_emulator.operation_names import MCP_OPERATIONS, Operation

BAD_GATEWAY = "<html><body><h1>502 Bad Gateway</h1></body></html>"


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Reply(Strict):
    """An answer that a request gets in place of its own. Times in seconds.

    `applied` carries the request out first and throws its answer away. `hang` waits before the
    reply, or until the client has gone. `kill` ends the instance that the request is about."""

    status: int = Field(default=502, ge=400, le=599)
    body: str | dict[str, Any] = BAD_GATEWAY
    retry_after: float | None = Field(default=None, ge=0)
    applied: bool = False
    hang: float = Field(default=0.0, ge=0, le=3_600)
    kill: bool = False


class Fault(Strict):
    """A fault: the requests that it hits, and its effect on them.

    The first matching requests get `replies` in turn, where null lets one through; the requests
    after them get `reply` with the probability `rate`, and so do those beyond `per_second` within a
    second. Every matching request first waits for `delay` seconds. `on` has "mcp" for all requests
    to MCP addresses and "any" for all requests; `endpoint` leaves out those to the other MCP
    address."""

    on: tuple[Operation | Literal["mcp", "any"], ...] = Field(min_length=1)
    endpoint: Literal["mcp", "api/v1/mcp"] | None = None
    replies: tuple[Reply | None, ...] = ()
    rate: float = Field(default=0.0, ge=0, le=1)
    per_second: int | None = Field(default=None, ge=1, le=1_000_000)
    reply: Reply = Reply()
    delay: float = Field(default=0.0, ge=0, le=3_600)

    def applies_to(self, operation: Operation, endpoint: str | None) -> bool:
        named = operation in self.on or "any" in self.on
        if not named and not ("mcp" in self.on and operation in MCP_OPERATIONS):
            return False
        return self.endpoint in (None, endpoint)


class VerifierOutcome(Strict):
    """An end of a verifier's execution, in place of the execution.

    "failed" is an execution that did not succeed, "judge_error" one that prints JUDGE ERROR and
    returns 0, "no_result" one that succeeds and returns nothing."""

    kind: Literal["failed", "judge_error", "no_result"]
    message: str = "injected"


class Faults(Strict):
    """All settable faults; unset ones are off. Times in seconds.

    `create_delay`: how long a new instance is pending. `mcp_warmup`: how long the MCP addresses of
    a new one answer 503. `mcp_limit`: MCP requests served at once, 429 beyond.
    `in_flight_creates`: creates at once, 429 beyond. `runner_token`: the instance runner
    requires it. `verifier_delay`: how long an executed verifier takes in addition. `verifiers`:
    outcomes of the next executions, null for a real one. `pictures`: whether the tool `computer`
    answers with an image, with JSON that holds one, or with JSON without.
    `removed_tools`: tools that instances have no more, under the same version.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0
    create_delay: float = Field(default=0.0, ge=0, le=3_600)
    in_flight_creates: int | None = Field(default=None, ge=0)
    instance_limit: int | None = Field(default=None, ge=0)
    mcp_warmup: float = Field(default=0.0, ge=0, le=3_600)
    mcp_limit: int | None = Field(default=None, ge=0)
    mcp_retry_after: float | None = Field(default=None, ge=0)
    runner_token: str | None = Field(default=None, min_length=1)
    verifier_delay: float = Field(default=0.0, ge=0, le=3_600)
    verifiers: tuple[VerifierOutcome | None, ...] = ()
    pictures: Literal["image", "json", "null"] = "image"
    removed_tools: tuple[str, ...] = ()


class FaultPlan:
    """The faults in force, and the positions of their sequences."""

    def __init__(
        self, runner_token: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`runner_token` is required even if no fault sets one."""
        self._clock = clock
        self._runner_token = runner_token
        self.set_faults(Faults())

    def set_faults(self, faults: Faults) -> None:
        """Replace all faults by these, from their beginning."""
        self.settings = faults
        self._random = random.Random(faults.seed)
        self._served = [0] * len(faults.faults)
        # By fault, when its requests were let through in the last second.
        self._admitted: list[deque[float]] = [deque() for _ in faults.faults]
        self._verified = 0

    @property
    def runner_token(self) -> str | None:
        return self.settings.runner_token or self._runner_token

    def next_reply(self, operation: Operation, endpoint: str | None) -> tuple[float, Reply | None]:
        """Return the seconds that a request waits, and the reply in place of its answer."""
        delay, reply = 0.0, None
        for index, fault in enumerate(self.settings.faults):
            if not fault.applies_to(operation, endpoint):
                continue
            delay += fault.delay
            if reply is None:
                reply = self._draw_reply(index, fault)
        return delay, reply

    def next_outcome(self) -> VerifierOutcome | None:
        """Return the outcome set for the next verifier execution; None when it is executed."""
        if self._verified >= len(self.settings.verifiers):
            return None
        self._verified += 1
        return self.settings.verifiers[self._verified - 1]

    def count_remaining(self) -> dict[str, Any]:
        """Count the remaining replies of each sequence."""
        replies = zip(self.settings.faults, self._served, strict=True)
        return {
            "replies": [len(fault.replies) - served for fault, served in replies],
            "verifiers": len(self.settings.verifiers) - self._verified,
        }

    def _draw_reply(self, index: int, fault: Fault) -> Reply | None:
        served = self._served[index]
        if served < len(fault.replies):
            self._served[index] += 1
            return fault.replies[served]
        if self._random.random() < fault.rate:
            return fault.reply
        if fault.per_second is None:
            return None
        now, admitted = self._clock(), self._admitted[index]
        while admitted and admitted[0] <= now - 1:
            admitted.popleft()
        if len(admitted) >= fault.per_second:
            return fault.reply
        admitted.append(now)
        return None
