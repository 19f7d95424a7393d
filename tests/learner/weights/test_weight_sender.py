"""The sender process and engines that receive from it."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flotilla_common.weights.weight_transfer import OpenGroup, decode_request, encode_request
from flotilla_learner.weights.live_sender import LiveSender
from flotilla_learner.weights.sender_config import WeightSenderConfig
from tests.support.process_commands import command_of
from tests.support.process_forge import ProcessForge
from tests.support.transfer_trials import Way, try_transfers
from tests.support.waiting import until

SENDER = "flotilla_learner.weights.adapters.weight_sender"


@pytest.mark.parametrize(
    "way", [pytest.param(Way("gloo"), marks=pytest.mark.slow), Way("ipc")], ids=str
)
async def test_whatever_becomes_of_one_the_others_are_sent_what_was_published(
    tmp_path: Path, way: Way, rank_forge: ProcessForge
) -> None:
    # test_vllm_engine.py has a sender of its own interpreter.
    await try_transfers(tmp_path, replace(way, forge=rank_forge))


def test_a_request_reads_as_it_was_written_and_nothing_else_does() -> None:
    opening = OpenGroup("g", 2, "gloo")
    assert decode_request(encode_request(opening)) == opening
    for text in ("", "[]", "{}", '{"kind": "OpenGroup"}', '{"kind": "Exit", "group": "g"}'):
        with pytest.raises(ValueError):
            decode_request(text)


@pytest.mark.slow
async def test_a_sender_that_stands_still_is_killed_without_waiting_for_a_publication(
    tmp_path: Path,
) -> None:
    sender = LiveSender(WeightSenderConfig("r"), tmp_path / "sender.log")
    try:
        sender.start_soon()
        await until(lambda: sender.address is not None, 60.0)
        [child] = [each for each in psutil.Process().children() if SENDER in command_of(each)]
        child.suspend()
        # An engine that joins it meanwhile waits until it is gone.
        await until(lambda: not child.is_running(), 60.0)
        assert sender.address is None

        def is_back() -> bool:
            # As each publication does, until it is there.
            sender.start_soon()
            return sender.address is not None

        await until(is_back, 60.0)
    finally:
        await sender.close()
