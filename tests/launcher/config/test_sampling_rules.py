"""Sampling for training that an engine cannot give is refused before anything starts."""

import json

import pytest

from flotilla_launcher.run_spec import BadSpecError, parse_spec
from tests.support.launcher import spec

FAKE = {"engine": {"kind": "fake"}}


def test_an_engine_that_names_no_candidates_is_refused_with_top_k() -> None:
    with pytest.raises(BadSpecError, match=r'"fake" does not name .* leave learner\.top_k out'):
        parse_spec(json.dumps(spec(learner={"top_k": 40}, rollout=FAKE)))
    parse_spec(json.dumps(spec(learner={}, rollout=FAKE)))
    parse_spec(json.dumps(spec(learner={"top_k": 40}, rollout={"engine": {"kind": "vllm"}})))
    parse_spec(json.dumps(spec(learner={"top_k": 40})))
