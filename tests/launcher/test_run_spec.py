"""Specs with hostile text, and what the launcher reads from others."""

import json

import pytest

from flotilla_common.process.own_version import own_version
from flotilla_common.spec.config import ConfigError
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.run_spec import BadSpecError, parse_spec
from tests.support.launcher import spec
from tests.support.run_specs import bare_spec


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


def test_machines_of_a_replica_are_counted_by_its_services_own_key() -> None:
    several = {"learner": {"rank": {"nodes": 3}}, "rollout": {"engine": {"nodes": 2}}}
    counts = map(bare_spec(several).machines_of, ("learner", "rollout", "env_gateway"))
    assert [*counts] == [3, 2, 1]
    assert bare_spec({}).machines_of("learner") == 1


def test_what_a_launcher_adds_to_a_spec_is_in_its_text_and_read() -> None:
    plain = parse_spec(json.dumps(spec()))
    written = plain.with_revision("a" * 40).with_writer()
    assert written == parse_spec(written.text)
    policy = {**spec()["policy"], "revision": "a" * 40}
    own = own_version().to_dict()
    assert json.loads(written.text) == {**spec(), "policy": policy, "written_by": own}
    assert json.loads(plain.text) == spec()


def test_further_machines_run_a_module_beside_their_service() -> None:
    named = bare_spec({}, LauncherConfig(modules={"learner": "mine.learner"}))
    assert bare_spec({}).further_module_of("learner") == "flotilla_learner.ranks"
    assert named.further_module_of("learner") == "mine.learner.ranks"
    assert named.further_module_of("rollout") == "flotilla_rollout.nodes"
