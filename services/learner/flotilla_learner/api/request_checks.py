"""Checks for every call to the learner, and its refusals."""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc
import grpc.aio

from flotilla_common.rpc.errors import ServiceError
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.groups.workers import TooManyWorkersError

DOMAIN = "learner.flotilla"
EPOCH_KEY = "flotilla-run-epoch"

Context = grpc.aio.ServicerContext[Any, Any]
FAILED = grpc.StatusCode.FAILED_PRECONDITION
RETRY_S = 1.0
# Longest name from a worker that the learner remembers.
_NAME_CHARACTERS = 256
# Most capabilities that any worker has, and most devices that an engine has.
MOST_CAPABILITIES = 64
MOST_DEVICES = 1024


def refuse(code: grpc.StatusCode, reason: str, message: str, **facts: str) -> ServiceError:
    return ServiceError(code, reason, message, domain=DOMAIN, metadata=facts)


def check_epoch(context: Context, run_epoch: int) -> None:
    """Refuse a call that names another run epoch than this learner's."""
    for key, value in context.invocation_metadata() or ():
        if key == EPOCH_KEY and value != str(run_epoch):
            message = f"the run is in epoch {run_epoch}; adopt it and call again"
            raise refuse(FAILED, "STALE_EPOCH", message, run_epoch=str(run_epoch))


class Digested(Protocol):
    """A request that names its caller's tokenizer."""

    tokenizer_digest: bytes
    tokenizer_json_digest: bytes
    chat_template_digest: bytes


def digests_of(request: Digested) -> TokenizerDigests:
    return TokenizerDigests(
        request.tokenizer_digest, request.tokenizer_json_digest, request.chat_template_digest
    )


def check_tokenizer(given: TokenizerDigests, expected: TokenizerDigests) -> None:
    """Refuse a worker whose token ids mean something else, and name the difference."""
    if given.whole == expected.whole:
        return
    differs = " and ".join(expected.differing_parts(given))
    what = f"{differs} of its policy.model differs" if differs else "its tokenizer differs"
    message = (
        f"the worker's prompts are not the learner's: {what} (digest"
        f" {given.whole.hex() or '(none)'}, the learner's {expected.whole.hex()}); give both the"
        " same policy.model"
    )
    raise refuse(FAILED, "TOKENIZER_MISMATCH", message, differs=differs)


def check_names(**names: str) -> None:
    """Refuse names that are empty or too long to remember."""
    for name, value in names.items():
        if not 0 < len(value) <= _NAME_CHARACTERS:
            message = f"{name} has {len(value)} characters; 1 to {_NAME_CHARACTERS} are needed"
            raise refuse(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", message)


def check_name_list(field: str, names: Collection[str], most: int) -> None:
    """Refuse more names than `most`, and overlong ones."""
    longest = max(map(len, names), default=0)
    if len(names) > most or longest > _NAME_CHARACTERS:
        message = (
            f"{len(names)} {field} of up to {longest} characters; at most {most},"
            f" of {_NAME_CHARACTERS}"
        )
        raise refuse(grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_REQUEST", message)


@contextmanager
def bounded_workers() -> Generator[None]:
    """Translate the refusal of a worker beyond the limit into the contract's."""
    try:
        yield
    except TooManyWorkersError as error:
        full = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_WORKERS", str(error))
        full.retry_delay_s = RETRY_S
        raise full from error
