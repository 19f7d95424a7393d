"""Large values are measured, and handled off the event loop."""

import asyncio
import base64
import json
import time
from typing import Any

import pytest

from flotilla_common.text.parsing import ASIDE_BYTES
from flotilla_env_gateway.large_values import dump_json_aside, estimate_size, run_aside_for

MIB = 2**20
PICTURE = base64.b64encode(b"\x89PNG" + b"p" * (11 * MIB)).decode()
MANY = [{"text": "x", "type": "text"}] * 40_000
ROWS = {"columns": ["a"], "rows": [[1, 2]] * 100_000}


@pytest.mark.parametrize(
    "value",
    [None, 1, 1.5, "text", [], {}, [1, [2, {"a": "b"}]], {"a": {"b": [1, 2, 3]}}],
)
def test_a_small_value_is_handled_where_it_is(value: object) -> None:
    assert len(json.dumps(value)) // 4 <= estimate_size(value) < ASIDE_BYTES


def test_the_size_of_a_large_value_is_known_without_a_look_at_all_of_it() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    for value in (nested, MANY, PICTURE, ROWS, list(range(10**6)), dict.fromkeys(range(10**6))):
        began = time.thread_time()
        assert estimate_size(value) > ASIDE_BYTES
        assert time.thread_time() - began < 0.03


async def test_an_error_off_the_loop_is_an_error() -> None:
    def fail() -> None:
        raise ValueError("why")

    for value in ([], MANY):
        with pytest.raises(ValueError, match="why"):
            await run_aside_for(value, fail)
    with pytest.raises(TypeError):
        await dump_json_aside([b"x" * ASIDE_BYTES])


def test_a_value_that_waits_for_its_thread_blocks_no_other() -> None:
    async def both() -> list[int]:
        order: list[int] = []
        slow = asyncio.create_task(run_aside_for(MANY, lambda: time.sleep(0.05) or order.append(2)))
        await run_aside_for([], lambda: order.append(1))
        await slow
        return order

    assert asyncio.run(both()) == [1, 2]
