"""Prints a digest of a batch as it is sent."""

import hashlib
from typing import Any

from tinker import types

from flotilla_learner.hosted.adapters import tinker_trainer
from flotilla_learner.hosted.datums import loss_batch, moving_parts
from flotilla_learner.hosted.step_result import prepare
from tests.learner.hosted.hosted_runs import learner_config, policy_config, train_batch


def main() -> None:
    config = learner_config(algorithm={"loss": "gspo"})
    prepared = prepare(train_batch(), config.algorithm, policy_config("http://127.0.0.1"))
    batch = loss_batch(moving_parts(prepared)[0], config.algorithm)
    loss: Any = batch.loss
    given = types.ForwardBackwardInput(
        data=[tinker_trainer.make_datum(row) for row in batch.sequences],
        loss_fn=loss,
        loss_fn_config=dict(batch.options),
    )
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="m", seq_id=1)
    body = tinker_trainer.StableRequest(request).SerializeToString()
    print(hashlib.sha256(body).hexdigest())


if __name__ == "__main__":
    main()
