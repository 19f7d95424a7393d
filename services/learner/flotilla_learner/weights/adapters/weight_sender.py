"""Sender of publications into live engines, a separate program.

A child of the learner service, beside WeightService and with the same line protocol. Engines meet
it at a store (`common/weights/weight_transfer.py`), each in its own group: one that dies or stalls
costs the others nothing. It ends when its stdin does, so it never outlives its parent."""

import json
import os
import queue
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_common.telemetry import log
from flotilla_common.tensors.buffer_group import BufferSender
from flotilla_common.tensors.shared_buffers import BufferPool, find_devices
from flotilla_common.tensors.tcp_store import PrefixStore, host_tcp_store
from flotilla_common.tensors.transfer_group import SENDER, CollectiveGroup, TransferGroup
from flotilla_common.text.json_lines import decode_line
from flotilla_common.text.printable_text import print_json
from flotilla_common.weights.network_interfaces import choose_interface
from flotilla_common.weights.weight_transfer import (
    ACCEPTED,
    REQUESTS,
    SETTINGS,
    OpenGroup,
    SendWeights,
    decode_request,
)
from flotilla_learner.weights.sender_config import PING, WeightSenderConfig
from flotilla_learner.weights.weight_snapshots import (
    SnapshotCache,
    SupersededError,
    WeightSnapshot,
)

# An engine without requests for this long opens a new group with its next one.
_IDLE_S = 3600.0
# Pieces in transit to an engine.
_AT_ONCE = 2
_log = log.get_logger(__name__)


class MappedFiles:
    """Files of publications, mapped once each: they are few, and rewritten repeatedly."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[int, Tensor]] = {}
        self._turn = threading.Lock()

    def map_file(self, snapshot: WeightSnapshot) -> Tensor:
        """Return the bytes of a publication, of shape [total_bytes]. Raises OSError."""
        inode = Path(snapshot.path).stat().st_ino
        with self._turn:
            known = self._maps.get(snapshot.path)
            if known is None or known[0] != inode or len(known[1]) != snapshot.total_bytes:
                data = torch.from_file(
                    snapshot.path, shared=True, size=snapshot.total_bytes, dtype=torch.uint8
                )
                known = self._maps[snapshot.path] = (inode, data)
            return known[1]


@dataclass
class EngineGroup:
    """Workers of one engine, served by a thread until one of them is gone."""

    opening: OpenGroup
    store: Any
    host: str
    shelf: SnapshotCache
    files: MappedFiles
    pool: BufferPool

    def __post_init__(self) -> None:
        self._requests: queue.Queue[SendWeights] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, name=self.opening.group, daemon=True)
        self._thread.start()

    @property
    def is_served(self) -> bool:
        """True while the group's thread answers requests."""
        return self._thread.is_alive()

    def add_request(self, request: SendWeights) -> None:
        """Have a publication sent, after those requested before."""
        self._requests.put(request)

    def _serve(self) -> None:
        name = self.opening.group
        try:
            group = self._join_group()
        except RuntimeError as error:
            _log.warning("no engine has joined", group=name, reason=str(error))
            return
        _log.info("an engine has joined", group=name, workers=self.opening.workers)
        try:
            while True:
                self._send_publication(group, self._requests.get(timeout=_IDLE_S))
        except queue.Empty:
            _log.info("an engine has sent no requests", group=name)
        # Any failure of a transfer ends the group: its engine opens another.
        except (RuntimeError, OSError) as error:
            _log.warning("an engine is lost", group=name, reason=str(error))
        group.abort()

    def _join_group(self) -> TransferGroup:
        opening, stall_s = self.opening, self.store.timeout.total_seconds()
        if opening.backend == "ipc":
            place = PrefixStore(opening.group, self.store)
            return BufferSender(place, opening.workers, self.pool, stall_s)
        size = opening.workers + 1
        return CollectiveGroup(
            self.store, self.host, opening.group, SENDER, size, opening.backend, stall_s
        )

    def _send_publication(self, group: TransferGroup, request: SendWeights) -> None:
        try:
            snapshot = self.shelf.find_snapshot(
                request.run_epoch, request.version, bytes.fromhex(request.fingerprint)
            )
        except SupersededError as error:
            self.store.set(request.answer, str(error))
            return
        data = self.files.map_file(snapshot)
        self.store.set(request.answer, ACCEPTED)
        device = torch.device("cuda") if self.opening.backend == "nccl" else data.device
        under_way: deque[Callable[[], object]] = deque()
        for start, end in request.pieces:
            under_way.append(group.begin_broadcast(data[start:end].to(device)))
            # Each is brought to its device while the previous one is sent.
            if len(under_way) == _AT_ONCE:
                under_way.popleft()()
        for wait in under_way:
            wait()
        # All workers have read the answer: they have received what followed it.
        self.store.delete_key(request.answer)


class WeightSender:
    """Groups of engines by name, and their incoming requests."""

    def __init__(self, store: Any, config: WeightSenderConfig) -> None:
        self.shelf = SnapshotCache()
        self._store = store
        self._host = config.reached_at
        self._stall = timedelta(seconds=config.settings.stall_s)
        self._files = MappedFiles()
        # Querying GPUs takes some of their memory.
        self.devices = find_devices() if config.shares_devices else {}
        self._pool = BufferPool(self.devices, config.settings.piece_bytes)
        self._groups: dict[str, EngineGroup] = {}

    def answer_for_ever(self) -> None:
        """Pass each request to its group."""
        while True:
            text = self._store.queue_pop(REQUESTS)
            try:
                request = decode_request(text)
            except ValueError as error:
                _log.warning("a request is malformed", reason=str(error))
                continue
            if isinstance(request, OpenGroup):
                self._open_group(request)
            else:
                self._pass_on(request)

    def _open_group(self, opening: OpenGroup) -> None:
        served = {name: group for name, group in self._groups.items() if group.is_served}
        store = self._store.clone()
        store.set_timeout(self._stall)
        self._groups = served
        self._groups[opening.group] = EngineGroup(
            opening, store, self._host, self.shelf, self._files, self._pool
        )

    def _pass_on(self, request: SendWeights) -> None:
        group = self._groups.get(request.group)
        if group is not None and group.is_served:
            group.add_request(request)
        else:
            self._store.set(request.answer, f"there is no group {request.group}")


def serve_engines(line: bytes) -> None:
    """Serve until stdin ends; `line` is its first one, the configuration."""
    config = decode_line(WeightSenderConfig, line)
    log.setup("weight_sender", config.run_id)
    torch.set_num_threads(1)
    choose_interface(config.reached_at)
    # There may be no requests for days.
    store = host_tcp_store(config.host, config.port, timedelta(days=365))
    store.set(SETTINGS, config.settings.to_text())
    sender = WeightSender(store, config)
    threading.Thread(target=sender.answer_for_ever, daemon=True).start()
    address = join_host_port(config.reached_at, store.port)
    print_json({"address": address, "devices": list(sender.devices)})
    while (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        if json.loads(line) == PING:
            print_json({"alive": True})
            continue
        snapshot = decode_line(WeightSnapshot, line)
        sender.shelf.add_snapshot(snapshot)
        print_json({"announced": [snapshot.run_epoch, snapshot.version]})
    # Threads that wait for engines would block an orderly exit, and have nothing to lose.
    os._exit(0)


def main() -> None:
    # Ctrl-C in a terminal is for the learner service, which closes this stdin when it drains.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve_engines(sys.stdin.buffer.readline())


if __name__ == "__main__":
    main()
