"""A judge behind the chat completions of an OpenAI-compatible API."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from flotilla_common.adapters.bounded_http import (
    AnswerError,
    ask,
    object_of,
    open_client,
    retry_after,
)
from flotilla_common.text.parsing import TextLimits, as_object
from flotilla_common.text.printable_text import one_line
from flotilla_common.text.redaction import redact
from flotilla_learner.config.endpoints import read_key
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.ports import (
    JudgeAnswer,
    JudgeDownError,
    JudgeRefusedError,
    UnusableAnswerError,
)

# The endpoint is overloaded; then it refuses whoever asks, whatever is asked.
_PASSING = (408, 409, 425, 429)
_CLOSED = (401, 402, 403, 404, 405)
_CONNECT_S = 10.0
_REASON_CHARACTERS = 400
_ANSWERS = TextLimits(bytes=2**22, values=2**14)


class ChatJudge:
    """One model of an endpoint. Implements `ports.Judge`."""

    def __init__(self, config: JudgeConfig) -> None:
        """Raises ConfigError if its key is missing."""
        key = read_key(config.api_key, "learner.judge.api_key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._config = config
        self._http = open_client(key, config.timeout_s, headers=headers)
        self._http.timeout = httpx.Timeout(config.timeout_s, connect=_CONNECT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def ask(self, messages: Sequence[Mapping[str, Any]], seed: int) -> JudgeAnswer:
        """See `ports.Judge`."""
        config = self._config
        body = {
            "model": config.model,
            "messages": list(messages),
            "temperature": 0,
            "max_tokens": config.max_tokens,
            "seed": seed,
        }
        url = f"{config.url}/chat/completions"
        try:
            answer = await ask(
                *(self._http, "POST", url), limits=_ANSWERS, whole_s=config.timeout_s, json=body
            )
        except AnswerError as error:
            raise UnusableAnswerError(f"{url}: {_short(error)}") from error
        except (httpx.ReadTimeout, httpx.WriteTimeout) as error:
            raise UnusableAnswerError(f"{url}: no answer within {config.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            reason = f"{url}: {_short(error) or type(error).__name__}"
            raise JudgeDownError(reason) from error
        if answer.is_success:
            return await _read_answer(answer)
        raise _refusal(url, answer)


def _refusal(url: str, answer: httpx.Response) -> Exception:
    """Return what an answer without success means for the question, or for all of them."""
    said = f"{url} answered {answer.status_code}: {_short(answer.text)}"
    if answer.is_server_error or answer.status_code in _PASSING:
        wait_s = retry_after(answer) if "retry-after" in answer.headers else 0.0
        return JudgeDownError(said, wait_s)
    if answer.status_code in _CLOSED:
        return JudgeRefusedError(f"learner.judge: {said}: correct its url, model or api_key")
    # It is about this question: too long, or against its rules.
    return UnusableAnswerError(said, final=True)


async def _read_answer(answer: httpx.Response) -> JudgeAnswer:
    """Return the answer in a completion. Raises UnusableAnswerError for any other content."""
    try:
        body = await object_of(answer, _ANSWERS)
        choice = as_object(body["choices"][0])
        text = as_object(choice["message"])["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise UnusableAnswerError(f"its answer is no chat completion: {_short(error)}") from error
    if not isinstance(text, str):
        raise UnusableAnswerError("its answer has no text")
    if choice.get("finish_reason") == "length":
        raise UnusableAnswerError("its answer was cut at learner.judge.max_tokens", text)
    usage = as_object(body.get("usage"))
    return JudgeAnswer(text, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _count(usage: Mapping[str, Any], name: str) -> int:
    number = usage.get(name)
    whole = isinstance(number, int | float) and math.isfinite(number) and 0 <= number < 2**40
    return int(number) if whole and number is not None else 0


def _short(text: object) -> str:
    return one_line(redact(str(text)), _REASON_CHARACTERS)
