"""The entry of the front door: `python -m flotilla_tinker --config SPEC`."""

import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NoReturn

from flotilla_common.process.loaded_objects import freeze_loaded_objects
from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import split_host_port
from flotilla_common.text.redaction import add_secret
from flotilla_common.wire.registry import load_registry
from flotilla_tinker.config.tinker import TinkerConfig

if TYPE_CHECKING:
    from flotilla_tinker.api.adapters.http_server import ServerSettings
    from flotilla_tinker.ports import FrontDesk
    from flotilla_tinker.work.desk import Desk
    from flotilla_tinker.work.limits import Limits

    DeskOpener = Callable[[Runtime[TinkerConfig], AsyncExitStack], Awaitable[FrontDesk]]

_DOC = """Answers clients of the Tinker SDK 0.38 over HTTP, at `tinker.listen`. It trains by the
learner's TrainingService and samples by the rollout's SamplingService; `--listen` serves its health
only. `flotilla tinker-serve MODEL` starts all three. To run it alone:

    FLOTILLA_TOKEN=... TINKER_KEY=tml-... python -m flotilla_tinker --config SPEC \\
        --peer learner=127.0.0.1:7001 --peer rollout=127.0.0.1:7002 '--tinker.keys.me=$TINKER_KEY'
"""
_SHORTEST_KEY = 16
# The SDK's own defaults.
_PART_BYTES, _SAMPLES = 5_000_000, 2000


def load() -> Callable[[Runtime[TinkerConfig]], Awaitable[None]]:
    return serve_front


async def serve_front(
    runtime: Runtime[TinkerConfig], open_desk: "DeskOpener | None" = None
) -> None:
    """Serve until drained. Orders that were accepted are kept, and carried out after a restart."""
    from flotilla_common.aio.concurrency import run_until_first
    from flotilla_common.rpc import rpc
    from flotilla_tinker.api.adapters.http_server import serving_http
    from flotilla_tinker.api.calls import Front
    from flotilla_tinker.api.keys import ClientKeys
    from flotilla_tinker.api.known_facts import KnownFacts

    config = runtime.config
    runtime.watchdog.limit_s = config.stall_s
    keys = ClientKeys(read_keys(config.keys, os.environ))
    async with AsyncExitStack() as stack:
        desk = await (open_desk or _open_desk)(runtime, stack)
        front = Front(desk, KnownFacts(desk), client_flags=client_flags(config))
        server = rpc.server(token=runtime.token)
        health = await stack.enter_async_context(runtime.serving(server))
        settings = _server_settings(config)
        address = await stack.enter_async_context(serving_http(front, keys, settings))
        freeze_loaded_objects()
        health.set_serving(True)
        runtime.report_status(lambda: ReplicaStatus("serving", serving=True))
        await runtime.announce(health.address)
        runtime.log.info("serving", address=health.address, clients=address)
        await run_until_first(runtime.drain.wait(), desk.wait_until_broken())


async def _open_desk(runtime: Runtime[TinkerConfig], stack: AsyncExitStack) -> "Desk":
    from flotilla_tinker import wire
    from flotilla_tinker.adapters.sampling_peer import GrpcSamplingPeer
    from flotilla_tinker.adapters.training_peer import GrpcTrainingPeer
    from flotilla_tinker.work.desk import open_desk

    training = GrpcTrainingPeer(await runtime.peers.channel("learner"))
    sampling = GrpcSamplingPeer(await runtime.peers.channel("rollout"))
    limits = desk_limits(runtime.config)
    opening = open_desk(runtime.run_dir, training, sampling, wire, limits=limits)
    return await stack.enter_async_context(opening)


def desk_limits(config: TinkerConfig) -> "Limits":
    """Return the bounds that the desk keeps."""
    from flotilla_tinker.work.limits import Limits

    most, kept = config.limits, config.retention
    return Limits(
        most_orders=most.samples,
        most_order_bytes=most.queued_bytes,
        largest_order=most.body_bytes,
        most_models=most.models,
        delivered_s=kept.delivered_s,
        undelivered_s=kept.undelivered_s,
        most_result_bytes=kept.bytes,
        stale_s=kept.session_s,
    )


def read_keys(keys: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the keys that variables hold, by name. Raises ConfigError."""
    from flotilla_tinker.api.keys import KEY_PREFIX

    found: dict[str, str] = {}
    for name, variable in keys.items():
        key = environ.get(variable[1:], "").strip()
        if not key.startswith(KEY_PREFIX) or len(key) < _SHORTEST_KEY:
            raise ConfigError(
                f"tinker.keys.{name}: {variable} must hold a key of at least {_SHORTEST_KEY}"
                f" characters that begins with {KEY_PREFIX}, since the SDK takes no others; `python"
                f" -c 'import secrets; print(\"{KEY_PREFIX}\" + secrets.token_urlsafe(24))'` makes"
                " one"
            )
        add_secret(key)
        found[name] = key
    if len(set(found.values())) < len(found):
        raise ConfigError("tinker.keys: two names have the same key")
    return found


def client_flags(config: TinkerConfig) -> dict[str, object]:
    """Return the flags by which clients keep to the limits."""
    return {
        "proto_compress_fwdbwd": config.compress_batches,
        "fwdbwd_max_chunk_bytes_count": min(_PART_BYTES, config.limits.body_bytes // 2),
        "sample_max_concurrent_requests": min(_SAMPLES, config.limits.samples),
    }


def _server_settings(config: TinkerConfig) -> "ServerSettings":
    from flotilla_tinker.api.adapters.http_server import ServerSettings

    host, port = split_host_port(config.listen, "listen")
    tls = config.tls
    return ServerSettings(
        host,
        port,
        config.limits.body_bytes,
        certificate=tls.certificate if tls else None,
        key=tls.key if tls else None,
    )


def main() -> NoReturn:
    """Run a Tinker server from its command line, and exit the process."""
    run_service_process("tinker", TinkerConfig, load, doc=_DOC, registry=load_registry)


if __name__ == "__main__":
    main()
