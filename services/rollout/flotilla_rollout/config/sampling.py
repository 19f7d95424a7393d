"""The section `[rollout]` as the sampling service reads it."""

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.number_ranges import Tokens
from flotilla_common.spec.spec import SharedConfig
from flotilla_rollout.config.rollout import RolloutConfig


class SamplingProcessConfig(RolloutConfig):
    """The whole section; what only a run's worker needs may be absent."""

    max_input_length: Tokens = 1
    max_generate_length: Tokens = 1

    def check(self, shared: SharedConfig) -> None:
        engine = self.engine
        if engine.kind != "vllm":
            raise ConfigError(f"rollout.engine.kind: {engine.kind} serves no samplers; set vllm")
        for key in ("data_parallel", "nodes", "pipeline_parallel"):
            if getattr(engine, key) > 1:
                raise ConfigError(
                    f"rollout.engine.{key}: samplers are served by one engine on one machine; set"
                    " it to 1"
                )
        if engine.device == "cpu" and engine.options.get("enable_chunked_prefill"):
            raise ConfigError(
                "rollout.engine.options.enable_chunked_prefill: on a CPU a prompt in pieces and a"
                " request's seed end the engine; leave it out"
            )
