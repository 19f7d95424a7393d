"""Attempts of a policy whose prompts open a thinking, played on a real engine."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from transformers import AddedToken, PreTrainedModel

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_common.domain.trajectory import Sequence
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.ports import Engine
from flotilla_rollout.types import Sampling
from tests.rollout.dialects.templates import chatml, tokenizer_with
from tests.support.rollout import FakeEnvironment, attempt, limits
from tests.support.tiny_model import reference_logprobs

BUDGET, TURN, WHOLE = 8, 24, 900


def make_thinker() -> TransformersTokenizer:
    opened = chatml("").replace("assistant\\n'", "assistant\\n<think>\\n'")
    made = tokenizer_with(opened).fast
    made.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    return TransformersTokenizer(made)


def check_trained_tokens(sequence: Sequence, model: PreTrainedModel, tolerance: float) -> None:
    """The policy's tokens alone have logprobs, each given all tokens before it."""
    expected: NDArray[np.float32] = reference_logprobs(model, sequence.token_ids)
    expected = expected[policy_mask(sequence.spans)[1:]]
    assert len(sequence.logprobs) == len(expected)
    assert np.abs(sequence.logprobs - expected).max() < tolerance


async def check_thinking_budget(engine: Engine, model: PreTrainedModel, tolerance: float) -> None:
    """A thinking is ended at its budget, and the policy continues after the mark."""
    tokenizer = make_thinker()
    dialect = TemplateDialect(tokenizer)
    bounds = limits(thinking_tokens=BUDGET, max_generate_length=TURN)
    run = AttemptRunner(engine, FakeEnvironment(), tokenizer, dialect, bounds)
    end, forced = dialect.thinking.end_ids, 0
    for seed in range(8):
        played = await run.run_attempt(replace(attempt(), sampling=Sampling(1.0, seed)))
        # A random policy may write the mark of a call, and gets another turn.
        sequence, turn = played.sequences[0], played.turns[0]
        assert turn.thinking_tokens <= BUDGET + len(end)
        check_trained_tokens(sequence, model, tolerance)
        lengths = [(span.author, span.length) for span in sequence.spans[1:]]
        if len(lengths) == 3:
            forced += 1
            assert lengths[:2] == [(Author.POLICY, BUDGET), (Author.FORCED, len(end))]
    # A random policy may end its thinking, or its turn, by itself.
    assert forced > 4


async def check_attempt_that_time_cuts(
    engine: Engine, model: PreTrainedModel, tolerance: float
) -> None:
    """A turn cut by the attempt's time limit is trained on as far as it was sampled."""
    tokenizer = make_thinker()
    dialect = TemplateDialect(tokenizer)
    # The speed of this machine is unknown.
    for seconds in (0.1, 0.2, 0.4, 0.8, 1.6):
        bounds = limits(max_generate_length=WHOLE, max_model_len=1024, attempt_timeout_s=seconds)
        run = AttemptRunner(engine, FakeEnvironment(), tokenizer, dialect, bounds)
        played = await run.run_attempt(attempt())
        if played.stop_reason is StopReason.TIMEOUT:
            [sequence] = played.sequences
            assert 0 < len(sequence.logprobs) < WHOLE
            check_trained_tokens(sequence, model, tolerance)
            return
    raise AssertionError("no turn was cut")
