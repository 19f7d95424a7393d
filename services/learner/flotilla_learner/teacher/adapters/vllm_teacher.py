"""A teacher that vLLM's OpenAI-compatible server serves.

Token ids are the prompt of a completion of one token, and vLLM's `prompt_logprobs` are the scores.
A server of anything else has none, and is refused.

vLLM takes them from the logits of the model without any sampling parameter: they are log-softmax at
temperature 1, whatever temperature a request asks for and the engine samples with, without
penalties, top_p or banned ids. So `--logprobs-mode raw_logprobs` and `processed_logprobs` give the
same numbers here, unlike for sampled tokens. `raw_logits` and `processed_logits` give logits, and
are refused, since they add up to more than a probability of 1."""

import asyncio
import hashlib
import math
from collections.abc import Mapping
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from flotilla_common.adapters.bounded_http import (
    AnswerError,
    ask,
    object_of,
    open_client,
    retry_after,
)
from flotilla_common.adapters.model_hub import fetch_files
from flotilla_common.adapters.token_text import TOKENIZER_FILE, NoTokenizerError, load_tokenizer
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.text.parsing import TextLimits, as_object
from flotilla_common.text.printable_text import one_line
from flotilla_common.text.redaction import redact
from flotilla_learner.config.endpoints import read_key
from flotilla_learner.config.teacher import TeacherConfig
from flotilla_learner.ports import TeacherDownError, TeacherRefusedError
from flotilla_learner.types import TeacherScores

_PASSING = (408, 409, 425, 429)
_CONNECT_S = 10.0
_REASON_CHARACTERS = 400
# Of the answer, for each logprob: numbers, a rank and the token's text.
_ENTRY_BYTES, _ENTRY_VALUES = 1024, 64
_SMALL = TextLimits(bytes=2**24, values=2**20)
# vLLM writes -9999 for minus infinity, which JSON lacks.
_LEAST_LOGPROB = -9000.0
# By which float32 may exceed a probability of 1.
_SLACK = 1e-3
# Tokens of the vocabulary whose text is compared at once, and tokens that are scored on trial.
_PIECE, _TRIED = 4096, 4


class VllmTeacher:
    """One model of a vLLM server. Implements `ports.Teacher`; each call asks once."""

    def __init__(
        self, config: TeacherConfig, top_k: int, policy: PolicyConfig, tokenizer_json: bytes
    ) -> None:
        """`tokenizer_json` is the SHA-256 of the policy's file. Raises ConfigError."""
        self.top_k = top_k
        self._config = config
        self._policy = policy
        self._tokenizer_json = tokenizer_json
        self._model = config.model
        key = read_key(config.api_key, "learner.teacher.api_key")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None)
        self._http = open_client(key, config.timeout_s, headers=headers, limits=limits)
        self._http.timeout = httpx.Timeout(config.timeout_s, connect=_CONNECT_S)

    async def close(self) -> None:
        await self._http.aclose()

    async def prove_tokenizer(self, hint_tokens: int = 0) -> None:
        """Check that the server has the model, room for whole sequences after `hint_tokens`, and
        the policy's tokenizer: the same file, and the same ids for the text of the whole
        vocabulary. Then score some tokens.

        Raises TeacherRefusedError, TeacherDownError."""
        card = await self._find_model()
        longest = card.get("max_model_len")
        needed = hint_tokens + self._policy.max_model_len + 1
        if not isinstance(longest, int) or longest < needed:
            raise self._refusal(
                f"the teacher takes {longest} tokens, but sequences have up to"
                f" policy.max_model_len, hints up to {hint_tokens}, and vLLM samples one more:"
                f" serve it with --max-model-len {needed}, or lower policy.max_model_len"
            )
        root = card.get("root")
        await asyncio.to_thread(self._compare_file, root if isinstance(root, str) else "")
        await self._compare_ids()
        await self.score_tokens(np.arange(_TRIED, dtype=np.int32), np.arange(1, _TRIED))

    async def score_tokens(
        self, token_ids: NDArray[np.int32], places: NDArray[np.int64]
    ) -> TeacherScores:
        """See `ports.Teacher`. Raises TeacherRefusedError, TeacherDownError."""
        ids = token_ids.tolist()
        body = {
            "model": self._model,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": self.top_k,
            "return_token_ids": True,
        }
        entries = len(ids) * (self.top_k + 2)
        limits = TextLimits(_SMALL.bytes + entries * _ENTRY_BYTES, 2**16 + entries * _ENTRY_VALUES)
        answer = await self._request("POST", f"{self._config.url}/completions", limits, json=body)
        try:
            return await asyncio.to_thread(_read_scores, answer, ids, places.tolist(), self.top_k)
        except ValueError as error:
            raise self._refusal(str(error)) from error

    async def _find_model(self) -> Mapping[str, Any]:
        answer = await self._request("GET", f"{self._config.url}/models", _SMALL)
        listed = answer.get("data")
        cards = [card for card in listed if isinstance(card, dict)] if listed else []
        names = [card.get("id") for card in cards]
        chosen = [card for card in cards if not self._model or card.get("id") == self._model]
        if not chosen or not isinstance(chosen[0].get("id"), str):
            raise self._refusal(f"it does not serve learner.teacher.model; it serves {names}")
        self._model = chosen[0]["id"]
        return chosen[0]

    def _compare_file(self, root: str) -> None:
        """Compare the tokenizer's file with the policy's. Raises TeacherRefusedError."""
        name = self._config.tokenizer or root
        try:
            path = fetch_files(name, None, [TOKENIZER_FILE]) / TOKENIZER_FILE
            found = hashlib.sha256(path.read_bytes()).digest()
        except (ConfigError, OSError) as error:
            raise TeacherRefusedError(
                f"learner.teacher.tokenizer: {name!r}, which the teacher's tokenizer is taken from,"
                f" has no {TOKENIZER_FILE} that can be read here; set it to a folder or hub id that"
                f" has the one that it is served with: {_short(error)}"
            ) from error
        if found != self._tokenizer_json:
            raise TeacherRefusedError(
                f"learner.teacher.tokenizer: the {TOKENIZER_FILE} of {name!r} is not that of"
                f" policy.model {self._policy.model!r}: the same ids would be other text, and their"
                " logprobs mean nothing; choose a teacher of the same family"
            )

    async def _compare_ids(self) -> None:
        """Compare the ids of text in which the whole vocabulary occurs. Raises
        TeacherRefusedError."""
        try:
            own = load_tokenizer(self._policy.model, self._policy.revision)
        except NoTokenizerError as error:
            raise TeacherRefusedError(str(error)) from error
        own.no_truncation()
        own.no_padding()
        url = f"{self._config.url.removesuffix('/v1')}/tokenize"
        count = max(own.get_vocab().values()) + 1
        for start in range(0, count, _PIECE):
            known = range(start, min(start + _PIECE, count))
            text = own.decode(list(known), skip_special_tokens=False)
            ids = own.encode(text, add_special_tokens=False).ids
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            answer = await self._request("POST", url, _SMALL, json=body)
            if answer.get("tokens") != ids:
                raise self._refusal(
                    f"it makes other ids of the text of tokens {known.start} to {known.stop - 1}"
                    " than the policy's tokenizer: serve the teacher with the tokenizer of"
                    f" policy.model {self._policy.model!r}"
                )

    async def _request(
        self, method: str, url: str, limits: TextLimits, **content: Any
    ) -> dict[str, Any]:
        """Return the JSON object of an answer. Raises TeacherRefusedError, TeacherDownError."""
        whole_s = self._config.timeout_s
        try:
            answer = await ask(self._http, method, url, limits=limits, whole_s=whole_s, **content)
            if answer.is_success:
                return await object_of(answer, limits)
        except AnswerError as error:
            raise self._refusal(str(error)) from error
        except httpx.HTTPError as error:
            reason = f"{url}: {_short(error) or type(error).__name__}"
            raise TeacherDownError(reason) from error
        except ValueError as error:
            raise TeacherDownError(f"{url} answered what is no JSON object: {error}") from error
        said = f"{url} answered {answer.status_code}: {_short(answer.text)}"
        if answer.is_server_error or answer.status_code in _PASSING:
            wait_s = retry_after(answer) if "retry-after" in answer.headers else 0.0
            raise TeacherDownError(said, wait_s)
        raise self._refusal(said)

    def _refusal(self, reason: str) -> TeacherRefusedError:
        return TeacherRefusedError(f"learner.teacher.url: {self._config.url}: {reason}")


def _short(text: object) -> str:
    return one_line(redact(str(text)), _REASON_CHARACTERS)


def _read_scores(
    answer: Mapping[str, Any], ids: list[int], places: list[int], top_k: int
) -> TeacherScores:
    """Return the scores that a completion holds. Raises ValueError for any other content."""
    try:
        choice = answer["choices"][0]
        scored, prompt = choice["prompt_logprobs"], choice["prompt_token_ids"]
    except (KeyError, IndexError, TypeError):
        scored = prompt = None
    if not isinstance(scored, list) or prompt is None:
        raise ValueError(
            "its completions have no prompt_logprobs with prompt_token_ids, which only vLLM"
            " returns: serve the teacher with vLLM 0.10.2 or later"
        )
    if prompt != ids or len(scored) != len(ids):
        raise ValueError("it scored other token ids than it was asked about")
    logprobs = np.zeros(len(places), np.float32)
    top_ids = np.zeros((len(places), top_k), np.int32)
    top_logprobs = np.zeros((len(places), top_k), np.float32)
    for row, place in enumerate(places):
        own, likeliest = _read_place(scored[place], ids[place], top_k)
        logprobs[row] = own
        for column, (token, logprob) in enumerate(likeliest):
            top_ids[row, column], top_logprobs[row, column] = token, logprob
    return TeacherScores(logprobs, top_ids, top_logprobs)


def _read_place(entries: object, token: int, top_k: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the logprob of the token, and the `top_k` likeliest with theirs, likeliest first.

    vLLM adds the token to them if it is none of them."""
    try:
        found = {int(key): float(entry["logprob"]) for key, entry in as_object(entries).items()}
        own = found[token]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"it has no logprob of token {token}") from None
    for number in found.values():
        # NaN is not above the bound either.
        if not (_LEAST_LOGPROB < number < math.inf):
            raise ValueError(
                f"it gives token {token}, or one beside it, the logprob {number}, from which"
                " nothing can be learned: see its log"
            )
    likeliest = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    if len(found) == top_k + 1:
        likeliest = [item for item in likeliest if item[0] != token]
    if len(likeliest) != top_k:
        raise ValueError(f"it gives {len(found)} logprobs at a token, not the {top_k} likeliest")
    if sum(math.exp(min(number, 1.0)) for number in found.values()) > 1 + _SLACK:
        raise ValueError(
            "its logprobs add up to a probability above 1: serve the teacher without"
            " --logprobs-mode, or with raw_logprobs"
        )
    return own, likeliest
