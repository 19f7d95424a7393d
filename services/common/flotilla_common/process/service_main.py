"""Entry of a service process: arguments, configuration, signals, exit codes."""

import asyncio
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc.aio
import structlog

from flotilla_common.process.arguments import (
    RUN_ID,
    TOKEN_VARIABLE,
    Arguments,
    parse_arguments,
    read_token,
)
from flotilla_common.process.exit_codes import CONFIG, OK, exit_code_of
from flotilla_common.process.loaded_objects import collect_rarely
from flotilla_common.process.private_process import keep_private
from flotilla_common.process.run_membership import RegistryContract, ReplicaIdentity
from flotilla_common.process.runtime import Runtime
from flotilla_common.process.service_lifecycle import Lifecycle
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import advertised_address, check_dial, check_listen
from flotilla_common.rpc.peer_channels import Peers
from flotilla_common.rpc.rpc import channel
from flotilla_common.rpc.tls import Tls, read_tls
from flotilla_common.spec.config import ConfigModel, parse_config
from flotilla_common.spec.spec import ServiceConfig, SharedConfig, parse_shared
from flotilla_common.spec.spec_loading import STANDARD_INPUT, load_spec
from flotilla_common.telemetry import log, metrics, trace
from flotilla_common.telemetry.watchdog import Watchdog
from flotilla_common.text.printable_text import print_json, print_visible
from flotilla_common.text.redaction import add_secret, find_references, secret_values

C = TypeVar("C", bound=ConfigModel)
Service = Callable[[Runtime[C]], Awaitable[None]]


def run_service_process(
    service: str,
    config_cls: type[C],
    load: Callable[[], Service[C]],
    *,
    doc: str,
    registry: Callable[[], RegistryContract] | None = None,
    check: Callable[[SharedConfig, C], str] | None = None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run a service from its command line, and exit the process.

    `load` does the heavy imports and returns the service's coroutine function; `--help` and
    `--check-config` do not call it. `registry` imports the contract that `--registry` needs.
    `--check-config` calls `check` for checks beyond reading the spec: it raises ConfigError, or
    returns what it could not check here.
    Exit codes: 0 done or drained, 2 the configuration is wrong, 3 failed for a reason that may
    pass (a peer that was away), 1 anything else.
    """
    keep_private()
    collect_rarely()
    arguments = parse_arguments(service, config_cls, doc, sys.argv[1:] if argv is None else argv)
    try:
        spec, shared, config = _read_config(service, config_cls, arguments)
        if arguments.check_config:
            unseen = check(shared, config) if check is not None else ""
            rest = f", as far as this machine can check: {unseen}" if unseen else ""
            print_visible(f"{arguments.config}: the configuration of {service} is valid{rest}")
            sys.exit(OK)
        if arguments.print_config:
            print_json(json.loads(config.model_dump_json()))
            sys.exit(OK)
        context = _make_context(service, arguments, shared, registry)
        _hide_named(spec.get(service, {}))
    except ConfigError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        sys.exit(CONFIG)
    _exit_at_once(_exit_code(context, _run(context, spec, shared, config, load)))


def _exit_at_once(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    A service has closed what it opened by now. The interpreter would still wait for threads and run
    the exit handlers of gRPC, vLLM, ZeroMQ and multiprocessing, in which a drained process can hang
    or crash and lose its exit code."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        # Its reader may be gone.
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@dataclass(frozen=True, slots=True)
class _ProcessContext:
    """Facts known before the event loop runs."""

    service: str
    arguments: Arguments
    run_id: str
    run_dir: Path
    token: str
    tls: Tls | None
    contract: RegistryContract | None
    log: structlog.stdlib.BoundLogger


def _read_config(
    service: str, config_cls: type[C], arguments: Arguments
) -> tuple[dict[str, Any], SharedConfig, C]:
    where = "spec" if arguments.config == STANDARD_INPUT else str(arguments.config)
    spec = load_spec(arguments.config, arguments.overrides)
    try:
        shared = parse_shared(spec, where=where)
    except ConfigError as first:
        _parse_own(service, config_cls, spec, where, first)
        raise
    config = _parse_own(service, config_cls, spec, where, None)
    if isinstance(config, ServiceConfig):
        config.check(shared)
    return spec, shared, config


def _parse_own(
    service: str, config_cls: type[C], spec: dict[str, Any], where: str, first: ConfigError | None
) -> C:
    """Parse the service's section; its problems follow those of `first` in one error."""
    try:
        return parse_config(config_cls, spec.get(service, {}), where=where, section=service)
    except ConfigError as error:
        raise ConfigError("\n".join(str(each) for each in (first, error) if each)) from error


def _make_context(
    service: str,
    arguments: Arguments,
    shared: SharedConfig,
    registry: Callable[[], RegistryContract] | None,
) -> _ProcessContext:
    if arguments.registry and registry is None:
        raise ConfigError(f"{service} cannot use a registry: pass --peer NAME=HOST:PORT")
    token, tls = read_token(arguments.token_file), read_tls(arguments.tls_dir)
    # Processes that a library starts, such as an engine's, inherit the whole environment.
    os.environ.pop(TOKEN_VARIABLE, None)
    run_id = arguments.run_id or _default_run_id(arguments.run_dir, shared.name)
    if tls is not None:
        tls.check_is(service, run_id)
    _check_addresses(arguments, encrypted=tls is not None)
    run_dir = arguments.run_dir or Path("runs") / run_id
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {run_dir}: {error.strerror}") from error
    log.setup(service, run_id, replica=arguments.replica)
    add_secret(token)
    contract = registry() if registry is not None and arguments.registry else None
    logger = log.get_logger(f"flotilla_{service}")
    return _ProcessContext(service, arguments, run_id, run_dir, token, tls, contract, logger)


def _default_run_id(run_dir: Path | None, name: str) -> str:
    """Return the name of the run's folder, so that every start in it has the same id, or a new id
    if there is no folder yet."""
    if run_dir is not None and RUN_ID.fullmatch(run_dir.name):
        return run_dir.name
    return f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def _hide_named(section: object) -> None:
    """Hide variables that the spec references in the log: each is a secret, whatever its name."""
    named = tuple(find_references(section))
    for value in secret_values(os.environ, also=named):
        add_secret(value)


def _check_addresses(arguments: Arguments, *, encrypted: bool) -> None:
    """Check all addresses before anything is loaded. Raises ConfigError."""
    host, port = check_listen(arguments.listen, encrypted=encrypted)
    advertised_address(host, port, arguments.advertise)
    for address in (*arguments.peers.values(), arguments.registry):
        if address is not None:
            check_dial(address, encrypted=encrypted)


async def _run(
    context: _ProcessContext,
    spec: dict[str, Any],
    shared: SharedConfig,
    config: C,
    load: Callable[[], Service[C]],
) -> None:
    arguments = context.arguments
    registry = _registry_channel(context, arguments.registry) if arguments.registry else None
    peers = _peers(context, registry)
    runtime = Runtime(
        service=context.service,
        config=config,
        shared=shared,
        spec=spec,
        run_id=context.run_id,
        run_dir=context.run_dir,
        token=context.token,
        tls=context.tls,
        peers=peers,
        replica=arguments.replica,
        listen=arguments.listen,
        advertise=arguments.advertise,
        watchdog=Watchdog(dump_folder=context.run_dir / "stacks"),
        log=context.log,
    )
    identity = ReplicaIdentity(
        context.run_id, context.service, arguments.replica, runtime.incarnation
    )
    lifecycle = Lifecycle(runtime.drain, identity, context.contract, registry)
    runtime.lifecycle = lifecycle
    try:
        await _serve(runtime, lifecycle, arguments, load)
    finally:
        await peers.close()
        if registry is not None:
            await registry.close()


def _peers(context: _ProcessContext, registry: grpc.aio.Channel | None) -> Peers:
    return Peers(
        token=context.token,
        run_id=context.run_id,
        replica=context.arguments.replica,
        fixed=context.arguments.peers,
        registry=context.contract,
        registry_channel=registry,
        tls=context.tls,
    )


def _registry_channel(context: _ProcessContext, address: str) -> grpc.aio.Channel:
    # No waiting for ready under TLS: a call that waits never shows why a handshake fails.
    tls = context.tls
    waits = tls is None
    return channel(address, token=context.token, wait_for_ready=waits, tls=tls, peer="launcher")


async def _serve(
    runtime: Runtime[C],
    lifecycle: Lifecycle,
    arguments: Arguments,
    load: Callable[[], Service[C]],
) -> None:
    lifecycle.install_signals()
    if arguments.metrics_listen:
        address = lifecycle.metrics_address = metrics.start_http(arguments.metrics_listen)
        runtime.log.info("metrics are served", address=f"http://{address}/metrics")
    service = load()  # before the watchdog: heavy imports are not a blocked event loop
    with runtime.watchdog.running():
        await lifecycle.run(service(runtime))


def _exit_code(context: _ProcessContext, run: Coroutine[Any, Any, None]) -> int:
    provider = trace.setup(context.service, context.run_id, context.run_dir / "traces")
    try:
        asyncio.run(run)
    except ConfigError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return CONFIG
    except Exception as error:
        # The outermost frame: any error becomes a log line and an exit code.
        context.log.exception("the service failed", error=repr(error))
        return exit_code_of(error)
    finally:
        if provider is not None:
            provider.shutdown()
    context.log.info("the service ended", pid=os.getpid())
    return OK
