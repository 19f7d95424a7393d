"""A teacher whose turns are paid for once: those of a try that was cut off are read from the
ledger, and only what follows is asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flotilla_launcher.cli.adapters.chat_endpoint import (
    ChatEndpoint,
    EndpointError,
    ModelTurn,
    WrittenCall,
)
from flotilla_launcher.cli.adapters.model_attempts import play_attempt
from flotilla_reading.data.collect.budget import (
    Limits,
    Prices,
    RequestPace,
    TeacherStoppedError,
    find_spent,
)
from flotilla_reading.data.collect.collection import SourceTask
from flotilla_reading.data.collect.fates import Outcome
from flotilla_reading.data.collect.ledger import Conversation, Ledger, Try
from flotilla_reading.data.collect.recorded_episodes import digest_of
from flotilla_reading.play.ports import EpisodePlayer, PlayError

Messages = Sequence[Mapping[str, Any]]
_MOST_FAILURES = 10
_NO_USAGE = "the endpoint does not count tokens, so --max-tokens and --max-cost cannot be kept"


@dataclass(slots=True)
class Teacher:
    """An endpoint with the ledger of its requests, and their bounds. `failures` counts the turns in
    succession that it did not give: an outage must not use up the tries of all tasks."""

    endpoint: ChatEndpoint
    ledger: Ledger
    limits: Limits
    prices: Prices
    pace: RequestPace
    most_turns: int
    failures: int = 0
    last_failure: str = ""

    def check(self) -> None:
        """Raise TeacherStoppedError if no further request may be sent."""
        if self.failures >= _MOST_FAILURES:
            raise TeacherStoppedError(self.last_failure)
        if spent := find_spent(self.ledger.spent, self.limits, self.prices):
            raise TeacherStoppedError(spent)

    async def play_try(self, player: EpisodePlayer, task: SourceTask, one: Try) -> None:
        """Play a try to its end, or go on with it, and write it to the ledger. Raises
        TeacherStoppedError, and then the try has not ended."""
        model = _LedgeredModel(self, one)
        attempt = await play_attempt(player, task.fields, model, self.most_turns)
        self.ledger.end_try(
            one,
            Outcome(attempt.reward, attempt.no_grade),
            attempt.stopped,
            Conversation(attempt.messages, model.tools),
        )


class _LedgeredModel:
    """The `Model` of one try."""

    def __init__(self, teacher: Teacher, one: Try) -> None:
        self._teacher = teacher
        self._try = one
        self._known = teacher.ledger.turns_of(one)
        self._turn = 0
        self.tools: Messages | None = None

    async def answer_messages(self, messages: Messages, tools: Messages) -> ModelTurn:
        """Raises EndpointError; TeacherStoppedError; and PlayError if the environment answers
        otherwise than before the try was cut off."""
        self.tools, number = tools, self._turn
        asked = digest_of([messages, tools])
        self._turn += 1
        known = self._known.get(number)
        if known is None:
            return await self._ask(messages, tools, number, asked)
        if known.asked != asked:
            raise PlayError(
                f"the try was cut off, and its environment did not answer turn {number} again as"
                " before"
            )
        return _to_turn(known.answer)

    async def _ask(self, messages: Messages, tools: Messages, number: int, asked: str) -> ModelTurn:
        teacher, watch = self._teacher, _TurnWatch(self._teacher, self._try, number, asked)
        try:
            turn = await teacher.endpoint.answer_messages(messages, tools, watch)
        except EndpointError as error:
            teacher.failures += 1
            teacher.last_failure = f"{teacher.failures} turns in succession failed: {error}"
            raise
        teacher.failures = 0
        usage = turn.usage and (turn.usage.prompt, turn.usage.completion)
        teacher.ledger.end_request(watch.last, _to_json(turn), usage)
        if usage is None and teacher.limits.need_usage:
            raise TeacherStoppedError(_NO_USAGE)
        return turn


class _TurnWatch:
    """The `RequestWatch` of a turn: each request is in the ledger before it is sent. `last` is the
    id of the last one."""

    def __init__(self, teacher: Teacher, one: Try, turn: int, asked: str) -> None:
        self.key = f"{teacher.ledger.collection_id}-{one.id}-{turn}"
        self.last = 0
        self._teacher = teacher
        self._begin = lambda: teacher.ledger.begin_request(one, turn, asked)

    async def admit(self) -> None:
        """Raises TeacherStoppedError."""
        self._teacher.check()
        await self._teacher.pace.wait()
        self._teacher.check()
        self.last = self._begin()

    def hold(self, seconds: float) -> None:
        self._teacher.pace.hold(seconds)


def _to_json(turn: ModelTurn) -> Any:
    calls = [asdict(call) for call in turn.calls]
    return {"message": turn.message, "text": turn.text, "calls": calls, "cut": turn.cut}


def _to_turn(answer: Any) -> ModelTurn:
    calls = tuple(WrittenCall(**call) for call in answer["calls"])
    return ModelTurn(answer["message"], answer["text"], calls, answer["cut"])
