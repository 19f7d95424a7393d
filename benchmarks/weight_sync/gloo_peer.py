"""A process of the comparison over gloo: `python -m benchmarks.weight_sync.gloo_peer KIND WHERE`.

`ours` receives from the sender at WHERE, with every check and without vLLM. `bare_sender` and
`bare_receiver` meet at port WHERE and broadcast the same buckets to each other without checks. Each
input line names a file that describes a publication; each output line is one JSON line of seconds.
"""

import json
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from benchmarks.weight_sync.publication import Clock
from flotilla_common.domain.policy import PolicyId
from flotilla_common.tensors.sender_connection import SenderConnection
from flotilla_common.weights.fingerprint import TensorEntry
from flotilla_common.weights.weight_transfer import OpenGroup, TransferSettings, plan_buckets

Take = Callable[[dict[str, Any], list[TensorEntry]], None]


def join_ours(address: str) -> Take:
    connection = SenderConnection(address, OpenGroup("peer", 1, "gloo"), 0, torch.device("cpu"))

    def take(publication: dict[str, Any], entries: list[TensorEntry]) -> None:
        policy = PolicyId(1, publication["version"], bytes.fromhex(publication["fingerprint"]))
        for _ in connection.request_weights(policy, entries, publication["total_bytes"]):
            pass

    return take


def join_bare(rank: int, port: int) -> Take:
    patience = timedelta(seconds=120)
    place = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2, timeout=patience)
    mapped: dict[str, torch.Tensor] = {}

    def take(publication: dict[str, Any], entries: list[TensorEntry]) -> None:
        path, total = publication["path"], publication["total_bytes"]
        if rank == 0 and path not in mapped:
            mapped[path] = torch.from_file(path, shared=True, size=total, dtype=torch.uint8)
        largest = TransferSettings().piece_bytes
        buffer = torch.empty(largest, dtype=torch.uint8)
        for bucket in plan_buckets(entries, total, largest):
            for start, end in bucket.pieces:
                dist.broadcast(mapped[path][start:end] if rank == 0 else buffer[: end - start], 0)

    return take


def main(kind: str, where: str) -> None:
    torch.set_num_threads(1)
    ranks = {"bare_sender": 0, "bare_receiver": 1}
    take = join_bare(ranks[kind], int(where)) if kind in ranks else join_ours(where)
    for line in sys.stdin:
        publication = json.loads(Path(line.strip()).read_text())
        entries = [TensorEntry(n, d, tuple(s), at, c) for n, d, s, at, c in publication["rows"]]
        if kind in ranks:
            dist.barrier()
        clock = Clock()
        take(publication, entries)
        print(json.dumps({"cpu_s": clock.cpu_s, "wall_s": clock.wall_s}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
