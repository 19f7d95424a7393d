"""Any source holds a verifier, or is refused with a precise error."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla_env_gateway.verify.verifier_source import VerifierError, find_verifier


@given(st.text())
@settings(deadline=None)
def test_any_source_is_a_verifier_or_an_error(source: str) -> None:
    try:
        assert find_verifier(source).name
    except VerifierError as error:
        assert str(error)


def test_the_verifier_is_found_by_its_shape() -> None:
    helper = "def helper(x):\n    return x\n"
    assert find_verifier(f"{helper}def check(env): ...").name == "check"
    decorated = f"{helper}@verifier(key='k')\ndef a(b, final_answer=None): ..."
    assert find_verifier(decorated).name == "a"
    assert find_verifier(decorated).takes_final_answer
    assert find_verifier(helper).name == "helper"
    with pytest.raises(VerifierError, match="async"):
        find_verifier("async def verify(env): ...")


def test_only_a_verifier_that_names_the_tasks_metadata_gets_it() -> None:
    named = find_verifier("def verify(env, metadata): ...")
    assert named.choose_arguments("a", "b", {"n": 1}) == {"metadata": {"n": 1}}
    everything = find_verifier("def verify(env, **rest): ...")
    assert everything.choose_arguments("a", "b", {"n": 1}) == {
        "final_answer": "a",
        "conversation": "b",
    }
