"""A learner without tensors, for `benchmarks.hostile_load`: `... FOLDER`. It prints its address.

Its services, journal and limits are real; its ranks are `FakeRanks`.
"""

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

from flotilla_common.rpc.free_ports import free_address
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.app import run_learner
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER, make_config, make_runtime

# As long as a long trajectory, so that the attackers' announced lengths are allowed.
SHARED = {"name": "test", "policy": {"model": "m", "dtype": "float32", "max_model_len": 2**17}}


async def main(folder: Path) -> None:
    config = make_config(
        folder, steps=100_000, groups_per_step=64, group_size=16, lease_ttl_s=300.0
    )
    address = free_address()
    runtime = make_runtime(folder, config, listen=address)
    runtime = replace(runtime, shared=parse_config(SharedConfig, SHARED, where="benchmark"))
    tracker = JsonlTracker(folder / "run" / "metrics.jsonl")
    print(json.dumps({"address": address}), flush=True)
    await run_learner(
        runtime,
        LearnerDependencies(FakeRanks(folder / "weights"), tracker, TokenizerDigests(TOKENIZER)),
    )


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
