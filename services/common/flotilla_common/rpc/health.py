"""grpc.health.v1 of one process: serving or not."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from flotilla_common.aio.change_signal import ChangeSignal
from flotilla_common.rpc.errors import make_refusal

WATCH = "/grpc.health.v1.Health/Watch"
METHODS = frozenset({"/grpc.health.v1.Health/Check", WATCH})
# These calls need no token.
MOST_WATCHES = 256


class Health(health_pb2_grpc.HealthServicer):
    """Health of the whole server (the empty service name); it starts as NOT_SERVING."""

    def __init__(self) -> None:
        self._serving = False
        self._changed = ChangeSignal()

    def set_serving(self, serving: bool) -> None:
        self._serving = serving
        self._changed.notify_all()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:
        if request.service:
            message = "health covers the whole server: leave the service name empty"
            raise make_refusal(grpc.StatusCode.NOT_FOUND, "UNKNOWN_SERVICE", message)
        return self._response()

    async def Watch(
        self, request: Any, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        while True:
            changed = self._changed.next_change
            if request.service:
                yield health_pb2.HealthCheckResponse(
                    status=health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                )
            else:
                yield self._response()
            await changed.wait()

    def _response(self) -> health_pb2.HealthCheckResponse:
        statuses = health_pb2.HealthCheckResponse
        return health_pb2.HealthCheckResponse(
            status=statuses.SERVING if self._serving else statuses.NOT_SERVING
        )
