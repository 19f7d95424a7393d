"""Specs whose commands and paths mean harm."""

import os
from pathlib import Path

import pytest

from services.common.config import ConfigError
from services.launcher.run_plan import BadSpecError, parse_spec
from tests.support.launcher import serving, spec


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{", '{"name": "x"}', "a: &a [*a]"])
def test_b53_a_spec_that_is_none_is_refused(text: str) -> None:
    with pytest.raises((BadSpecError, ConfigError)):
        parse_spec(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"learner":' * 2000 + "1" + "}" * 2000, "nested more than 100 deep"),
        ("[" + "[]," * 300_000 + "1]", "more than 65536 values"),
        ('{"name": "a", "name": "b"}', "the key 'name' is repeated"),
        ('{"name": "a", "seed": 1e999}', "1e999 is too large for a number"),
    ],
    ids=["deep", "many", "repeated", "infinite"],
)
def test_a_spec_of_too_much_is_refused_before_it_is_built(text: str, message: str) -> None:
    with pytest.raises(BadSpecError, match=message):
        parse_spec(text)


async def test_b52_a_new_run_never_takes_a_folder_or_link_that_is_there(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    async with serving(runs) as served:
        first = await served.start(spec())
        await served.ended(first)
        # Whatever the clock says, the next ids are all taken by links to somewhere else.
        base = first.rpartition("-")[0]
        for second in range(60):
            (runs / f"{base}-{int(first[-6:]) + second + 1:06d}").symlink_to(outside)
        run_id = await served.start(spec())
        await served.ended(run_id)
    assert not (runs / run_id).is_symlink()
    assert os.listdir(outside) == []
