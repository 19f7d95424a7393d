"""The methods of Tinker's client, and a call of each."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.tinker.client.served import adam, example, new_trainer, prompt_of, tinker
from tests.tinker.client.stage import MODEL

IDS = tuple(range(300, 320))
_IDS = re.compile(r"[0-9a-f]{32}")
# What a method needs of the world: the clients of one session.
Call = Callable[["World"], Any]


@dataclass(frozen=True, slots=True)
class World:
    client: Any
    rest: Any
    trainer: Any
    sampler: Any
    # Paths of a saved state and of a sampler's weights.
    state: str
    weights: str

    def sample(self, **options: Any) -> Any:
        return self.sampler.sample(
            prompt_of(IDS), 1, tinker.SamplingParams(max_tokens=2), **options
        )

    def rl_batch(self, loss: str) -> list[Any]:
        ones = np.ones(len(IDS) - 1, np.float32)
        mask = {"sequence_ratio_mask": ones} if loss == "gspo" else {}
        return [example(IDS, logprobs=-ones, advantages=ones, **mask)]


def make_world(client: Any, rest: Any) -> World:
    trainer = new_trainer(client)
    state = trainer.save_state("methods", ttl_seconds=3600).result().path
    weights = trainer.save_weights_for_sampler("methods", ttl_seconds=3600).result().path
    sampler = client.create_sampling_client(model_path=weights).result()
    return World(client, rest, trainer, sampler, state, weights)


def _custom(world: World) -> Any:
    def loss(data: Any, logprobs: Any) -> tuple[Any, dict[str, float]]:
        return -sum(each.sum() for each in logprobs), {}

    return world.trainer.forward_backward_custom([example(IDS)], loss)


def _traced(world: World) -> Any:
    def methods_nll(logprobs: Any) -> tuple[Any, dict[str, Any]]:
        return -logprobs.sum(), {}

    return world.client.create_custom_loss(methods_nll, {"logprobs": 1})


def _backward(name: str) -> Call:
    return lambda world: world.trainer.forward_backward(world.rl_batch(name), name)


_TARGETS = [[each] for each in IDS[1:]]
METHODS: dict[str, Call] = {
    "ServiceClient.create_lora_training_client": lambda w: w.client.create_lora_training_client(
        MODEL
    ),
    "ServiceClient.create_training_client_from_state": lambda w: (
        w.client.create_training_client_from_state(w.state)
    ),
    "ServiceClient.create_training_client_from_state_with_optimizer": lambda w: (
        w.client.create_training_client_from_state_with_optimizer(w.state)
    ),
    "ServiceClient.create_sampling_client": lambda w: w.client.create_sampling_client(
        base_model=MODEL
    ),
    "ServiceClient.create_custom_loss": _traced,
    "ServiceClient.copy_weights": lambda w: w.client.copy_weights(w.state),
    "TrainingClient.forward": lambda w: w.trainer.forward([example(IDS)], "cross_entropy"),
    "TrainingClient.forward_backward, cross_entropy": lambda w: w.trainer.forward_backward(
        [example(IDS)], "cross_entropy"
    ),
    **{
        f"TrainingClient.forward_backward, {name}": _backward(name)
        for name in ("importance_sampling", "ppo", "cispo", "dro", "gspo")
    },
    # A model of its own: after a refusal the client leaves a number out, for which a model waits.
    "TrainingClient.forward_backward, stable_reinforce": lambda w: new_trainer(
        w.client
    ).forward_backward(w.rl_batch("ppo"), "stable_reinforce"),
    "TrainingClient.forward_backward_custom": _custom,
    "TrainingClient.optim_step": lambda w: w.trainer.optim_step(adam()),
    "TrainingClient.save_state": lambda w: w.trainer.save_state("methods-2", ttl_seconds=3600),
    "TrainingClient.load_state": lambda w: w.trainer.load_state(w.state),
    "TrainingClient.load_state_with_optimizer": lambda w: w.trainer.load_state_with_optimizer(
        w.state
    ),
    "TrainingClient.save_weights_for_sampler": lambda w: w.trainer.save_weights_for_sampler(
        "methods-3", ttl_seconds=3600
    ),
    "TrainingClient.save_weights_and_get_sampling_client": lambda w: (
        w.trainer.save_weights_and_get_sampling_client()
    ),
    "TrainingClient.save_weights_and_get_sampling_client, inflight": lambda w: (
        w.trainer.save_weights_and_get_sampling_client(kind="inflight")
    ),
    "TrainingClient.create_sampling_client": lambda w: w.trainer.create_sampling_client(w.weights),
    "TrainingClient.save_weights_external": lambda w: new_trainer(w.client).save_weights_external(
        "methods"
    ),
    "SamplingClient.sample": lambda w: w.sample(),
    "SamplingClient.sample, include_prompt_logprobs": lambda w: w.sample(
        include_prompt_logprobs=True
    ),
    "SamplingClient.sample, topk_prompt_logprobs": lambda w: w.sample(
        include_prompt_logprobs=True, topk_prompt_logprobs=3
    ),
    "SamplingClient.sample, topk_sample_logprobs": lambda w: w.sample(topk_sample_logprobs=3),
    "SamplingClient.sample, target_prompt_logprobs": lambda w: w.sample(
        target_prompt_logprobs=tinker.TensorData.from_numpy(np.array(_TARGETS, np.int64))
    ),
    "SamplingClient.sample, prompt_alt_tokens_k": lambda w: w.sample(prompt_alt_tokens_k=2),
    "SamplingClient.sample, stop=[]": lambda w: w.sampler.sample(
        prompt_of(IDS), 1, tinker.SamplingParams(max_tokens=2, stop=[])
    ),
    "SamplingClient.compute_logprobs": lambda w: w.sampler.compute_logprobs(prompt_of(IDS)),
    "SamplingClient.compute_logprobs, prompt_logprobs_last_n": lambda w: w.sampler.compute_logprobs(
        prompt_of(IDS), prompt_logprobs_last_n=3
    ),
    "RestClient.get_server_capabilities": lambda w: w.rest.get_server_capabilities(),
    "RestClient.get_training_run": lambda w: w.rest.get_training_run(w.trainer.model_id),
    "RestClient.get_training_run_by_tinker_path": lambda w: w.rest.get_training_run_by_tinker_path(
        w.state
    ),
    "RestClient.get_weights_info_by_tinker_path": lambda w: w.rest.get_weights_info_by_tinker_path(
        w.state
    ),
    "RestClient.list_training_runs": lambda w: w.rest.list_training_runs(),
    "RestClient.list_checkpoints": lambda w: w.rest.list_checkpoints(w.trainer.model_id),
    "RestClient.list_user_checkpoints": lambda w: w.rest.list_user_checkpoints(),
    "RestClient.set_checkpoint_ttl_from_tinker_path": lambda w: (
        w.rest.set_checkpoint_ttl_from_tinker_path(w.state, 7200)
    ),
    "RestClient.publish_checkpoint_from_tinker_path": lambda w: (
        w.rest.publish_checkpoint_from_tinker_path(w.state)
    ),
    "RestClient.unpublish_checkpoint_from_tinker_path": lambda w: (
        w.rest.unpublish_checkpoint_from_tinker_path(w.state)
    ),
    "RestClient.copy_weights": lambda w: w.rest.copy_weights(w.state, "project"),
    "RestClient.get_external_weights_urls": lambda w: w.rest.get_external_weights_urls(
        f"tinker://{w.trainer.model_id}/external_weights/methods"
    ),
    "RestClient.get_session": lambda w: w.rest.get_session(w.trainer.model_id.split(":")[0]),
    "RestClient.list_sessions": lambda w: w.rest.list_sessions(),
    "RestClient.get_sampler": lambda w: w.rest.get_sampler(w.sampler._sampling_session_id),
    "RestClient.delete_checkpoint": lambda w: w.rest.delete_checkpoint(
        w.trainer.model_id, w.weights.partition(f"{w.trainer.model_id}/")[2]
    ),
    "RestClient.delete_checkpoint_from_tinker_path": lambda w: (
        w.rest.delete_checkpoint_from_tinker_path(w.state)
    ),
}
# They ask for organizations, bills and projects, which this server does not have.
NOT_OURS = frozenset(
    f"RestClient.{name}"
    for name in (
        "get_audit_log",
        "assign_session_project",
        "export_session_trace",
        "whoami",
        "get_billing_usage",
        "get_current_checkpoint_storage_usage",
        "search_sessions",
    )
)
# They ask no server.
LOCAL = frozenset(
    {
        "ServiceClient.close",
        "ServiceClient.create_rest_client",
        "ServiceClient.get_console_url",
        "ServiceClient.get_server_capabilities",
        "ServiceClient.get_telemetry",
        "TrainingClient.get_console_url",
        "TrainingClient.get_info",
        "TrainingClient.get_telemetry",
        "TrainingClient.get_tokenizer",
        "SamplingClient.create",
        "SamplingClient.from_sampler_handle",
        "SamplingClient.get_base_model",
        "SamplingClient.get_sampler_handle",
        "SamplingClient.get_telemetry",
        "SamplingClient.get_tokenizer",
        "SamplingClient.on_queue_state_change",
        "RestClient.get_telemetry",
    }
)


def call_method(name: str, world: World) -> str:
    """Call a method; return why it was refused, or "" if it worked."""
    try:
        METHODS[name](world).result(timeout=120)
    except (tinker.TinkerError, TimeoutError, ValueError, RuntimeError) as error:
        return _reason_of(error)
    return ""


def _reason_of(error: Exception) -> str:
    """The server's words, without what differs from run to run."""
    body = getattr(error, "body", None)
    told = str(body["detail"]) if isinstance(body, dict) and "detail" in body else str(error)
    told = told.removeprefix("Request failed: ").partition(" for self.request_id=")[0]
    return _IDS.sub("ID", told).replace("|", "/").replace("\n", " ")


def public_methods() -> set[str]:
    """The methods of the installed client; a deprecated twin of a method is none."""
    classes = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")
    return {
        f"{kind}.{name}"
        for kind in classes
        for name in vars(getattr(tinker, kind))
        if not name.startswith("_")
        and not name.endswith("_async")
        and callable(getattr(getattr(tinker, kind), name))
    }
