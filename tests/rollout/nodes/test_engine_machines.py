"""A real engine whose workers are on two machines: what one machine samples, and never a mixed
policy."""

from pathlib import Path

import pytest

from tests.rollout.adapters.test_vllm_parallel import errors_of
from tests.rollout.adapters.tiny_engines import TOLERANCE
from tests.rollout.nodes.machines import config_of, head
from tests.support.tiny_model import make_sparse_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]


async def test_two_machines_follow_the_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make_sparse_model(folder)
    async with head(tmp_path, folder, config_of()) as rollout:
        machine = await rollout.machine()
        engine = await rollout.start()
        assert len(machine.workers()) == 1
        assert max(await errors_of(engine, tmp_path, model)) < TOLERANCE
