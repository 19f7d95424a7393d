"""The sender process and engines that receive from it."""

from pathlib import Path

import pytest

from services.common.weight_transfer import OpenGroup, decode_request, encode_request
from tests.support.transfer_trials import Way, try_transfers


@pytest.mark.parametrize("way", [Way("gloo"), Way("ipc")], ids=str)
async def test_whatever_becomes_of_one_the_others_are_sent_what_was_published(
    tmp_path: Path, way: Way
) -> None:
    await try_transfers(tmp_path, way)


def test_a_request_reads_as_it_was_written_and_nothing_else_does() -> None:
    opening = OpenGroup("g", 2, "gloo")
    assert decode_request(encode_request(opening)) == opening
    for text in ("", "[]", "{}", '{"kind": "OpenGroup"}', '{"kind": "Exit", "group": "g"}'):
        with pytest.raises(ValueError):
            decode_request(text)
