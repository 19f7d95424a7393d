"""Refusals of the sampling service; sampling_service.proto lists the reasons."""

from collections.abc import Generator
from contextlib import contextmanager

import grpc

from flotilla_common.rpc.errors import ServiceError
from flotilla_rollout.sampling.ports import UnfitWeights

DOMAIN = "rollout.flotilla"


def refuse(code: grpc.StatusCode, reason: str, message: str) -> ServiceError:
    return ServiceError(code, reason, message, domain=DOMAIN)


def bad_request(message: str) -> ServiceError:
    return refuse(grpc.StatusCode.INVALID_ARGUMENT, "BAD_REQUEST", message)


def engine_dead(error: Exception) -> ServiceError:
    """Return the error that ends the process with the exit code for "retryable"."""
    return refuse(grpc.StatusCode.UNAVAILABLE, "ENGINE_DEAD", str(error))


@contextmanager
def refusing_unfit() -> Generator[None]:
    try:
        yield
    except UnfitWeights as error:
        raise refuse(grpc.StatusCode.NOT_FOUND, "NO_WEIGHTS", str(error)) from error
