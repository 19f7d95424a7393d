"""The rollout's section of a run spec, `[rollout]`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Count, Seconds, Tokens
from flotilla_common.spec.spec import PolicyConfig, ServiceConfig, SharedConfig
from flotilla_rollout.config.engine_options import OptionsContext, find_refusals
from flotilla_rollout.dialects.turns import Finish, Retention
from flotilla_rollout.episodes.attempt_limits import AttemptLimits, Side
from flotilla_rollout.work.options import BurnInHints, BurnInLengths, WorkerOptions


class DialectConfig(ConfigModel):
    """Dialect of the policy's family of models."""

    # `auto` goes by policy.model; a family, such as `qwen3`, is for its fine-tunes; `template` is
    # the model's own chat template; `full` explains everything in a system message, for models
    # that have not seen tools.
    name: str = "auto"
    # With `template`: names of vLLM's tool parser and reasoning parser. Without them, calls are
    # JSON between <tool_call> tags, and the thinking is between <think> tags.
    parser: str = ""
    reasoning: str = ""
    # The turn that ends an attempt: "answer", one without a call, or "done", one with <done>; a
    # policy that does neither gets an error message. With `full` it is always "done".
    finish: Finish = "answer"
    # The thinking of earlier turns that stays visible to the policy: "all" of it, or the part that
    # its own template shows, "tool_cycle". Shown text is never removed: a template that drops some
    # of it before the next turn is refused.
    retention: Retention = "all"
    # With a renderer: accept that it writes another prompt than the model's own chat template.
    own_prompt: bool = False
    # A Jinja file in place of the model's own chat template, from the spec's folder or the working
    # directory; absent: the model's.
    chat_template: str = ""
    # Variables of the chat template, or fields of the family's renderer: enable_thinking = false.
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class LimitsConfig(ConfigModel):
    """Limits of an attempt besides its turns, its length and its time, and of a tool's answer.

    An absent limit does not apply."""

    # Tokens of one turn, including thinking and all requests of a continued turn.
    turn_tokens: Tokens | None = None
    # Tokens that the policy may write in the whole attempt, thinking included.
    sampled_tokens: Tokens | None = None
    # Tokens of the thinking at the start of each turn: it is ended there, and the turn continues.
    thinking_tokens: Tokens | None = None
    # Executed tool calls; one more ends the attempt.
    calls: Count | None = None
    # Malformed calls that are reported to the policy; one more ends the attempt.
    parse_errors: int | None = Field(default=None, ge=0, le=1_000_000)
    # Tokens of one tool's answer that the policy reads. The verifier reads the whole answer.
    observation_tokens: Tokens | None = None
    # The side of a longer answer that is left out, with a mark that gives the number of tokens.
    observation_side: Side = "middle"
    # A turn that runs into max_generate_length without a call: "end" ends the attempt, "continue"
    # continues the turn in another request.
    on_cut: Literal["end", "continue"] = "end"


class BurnInConfig(ConfigModel):
    """A test of the engine at the greatest lengths, before a worker takes its first lease."""

    enabled: bool = True
    # Tokens of the answer; absent: max_generate_length. The prompt fills the rest of an attempt's
    # length.
    answer_tokens: Tokens | None = None
    timeout_s: Seconds = 600.0


class EngineConfig(ConfigModel):
    """The inference engine. CPU and GPU share one code path, and differ only in these options."""

    # `tinker`: a service that speaks Tinker's protocol, which learner.engine = "tinker" implies.
    kind: Literal["vllm", "fake", "tinker"] = "vllm"
    device: Literal["cpu", "cuda"] = "cuda"
    # GPUs that hold one copy of the model.
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    # Engines of one replica, each with a copy of the model on its own GPUs. They start one after
    # another, take every update together, and all end when one dies.
    data_parallel: int = Field(default=1, ge=1, le=1024)
    # Machines that carry one engine, joined by Ray (the extra `ray`), each with an equal number of
    # its workers; all but the first run `python -m flotilla_rollout.nodes`. Samples change only by
    # rounding.
    nodes: int = Field(default=1, ge=1, le=1024)
    # The network between these machines. vLLM's workers use gloo, NCCL and ZeroMQ, which neither
    # encrypt nor authenticate, and a reader of Ray's token on the wire can run programs on all of
    # them, so several nodes are refused on a `public` network, one shared with strangers.
    network: Literal["private", "public"] = "private"
    # How long the machines wait for each other.
    join_s: Seconds = 300.0
    # Port of the first machine at which Ray joins the others.
    ray_port: int = Field(default=6391, ge=1, le=65535)
    # Concurrent requests in each engine.
    max_num_seqs: Count = 256
    # Tokens computed in one engine step; absent: the engine's choice on a GPU, and enough for one
    # whole prompt on a CPU, where a prompt split in pieces and a seed would kill the engine.
    max_num_batched_tokens: Tokens | None = None
    # Bytes for the KV cache; absent: gpu_memory_utilization decides on a GPU, 256 MiB on a CPU.
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1, le=2**50)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    # Tokens per KV block; absent: the engine's choice on a GPU, 32 on a CPU.
    block_size: int | None = Field(default=None, ge=1, le=2**16)
    # No compilation and no CUDA graphs: starts faster and decodes slower. Absent: true on a CPU.
    enforce_eager: bool | None = None
    # Sample every attempt with the seed of its lease: reproducible, at some cost with many
    # sequences and large vocabularies.
    seeded: bool = True
    # Added to the engine process's environment before it starts.
    env: dict[str, str] = Field(default_factory=dict[str, str])
    # Arguments of vLLM by name, such as moe_backend; engine_options.py lists the refused ones with
    # reasons.
    options: dict[str, Any] = Field(default_factory=dict[str, Any])

    @property
    def workers(self) -> int:
        """Number of computing GPUs, or processes on a CPU."""
        return self.tensor_parallel * self.data_parallel * self.pipeline_parallel

    @property
    def machine_workers(self) -> int:
        """Number of computing GPUs, or processes on a CPU, per machine."""
        return self.workers // self.nodes

    @property
    def transfers(self) -> tuple[str, ...]:
        """Backends over which the engine can receive weights, best first."""
        if self.kind != "vllm":
            return ()
        return ("nccl", "ipc", "gloo") if self.device == "cuda" else ("ipc", "gloo")

    @property
    def pipeline_parallel(self) -> int:
        return int(self.options.get("pipeline_parallel_size", 1))

    @model_validator(mode="after")
    def _options_break_nothing(self) -> Self:
        context = OptionsContext(self.device, self.seeded)
        refusals = [f"options.{each}" for each in find_refusals(self.options, context)]
        if refusals:
            raise ValueError("; ".join(refusals))
        return self

    @model_validator(mode="after")
    def _machines_carry_one_engine(self) -> Self:
        if self.nodes > 1 and (why := self._refusal_of_machines()):
            raise ValueError(f"nodes: {self.nodes}, but {why}")
        return self

    def _refusal_of_machines(self) -> str:
        if self.kind == "fake":
            return "a fake engine has no workers; set rollout.engine.nodes = 1"
        if self.network == "public":
            return (
                "network is 'public': workers of several machines speak gloo, NCCL and ZeroMQ,"
                " which neither encrypt nor authenticate; put the machines into one private"
                " network and set rollout.engine.network = 'private', or set nodes = 1"
            )
        if self.data_parallel > 1:
            return (
                f"data_parallel is {self.data_parallel}: machines carry one engine; set"
                " rollout.engine.data_parallel = 1, and take more replicas"
                " (launcher.rollout.replicas)"
            )
        if self.workers % self.nodes:
            return (
                f"tensor_parallel and options.pipeline_parallel_size make {self.workers} workers,"
                " of which each machine is to have as many; set rollout.engine.tensor_parallel to"
                f" a multiple of {self.nodes}"
            )
        if "distributed_executor_backend" in self.options:
            return (
                "options.distributed_executor_backend is set: several machines are joined by Ray;"
                " leave it out"
            )
        return ""


class SamplersConfig(ConfigModel):
    """Samplers of `python -m flotilla_rollout.sampling`, which a run has none of."""

    # Open ones. Adapters of all of them are kept in the host's memory.
    max_samplers: Count = 64
    # The largest rank of an adapter; 0 leaves no room for adapters, and answers a little faster.
    max_rank: int = Field(default=32, ge=0, le=512)
    # Adapters that answer concurrently, each with room of max_rank on the device; requests to
    # others wait.
    max_active: Count = 8


class RolloutConfig(ServiceConfig):
    """The whole section `[rollout]`."""

    # Concurrent attempts of one replica.
    max_attempts: Count = 64
    max_turns: Count = 50
    # Tokens of prompt and turns beyond which no further turn begins.
    max_input_length: Tokens
    # Tokens of one policy turn.
    max_generate_length: Tokens
    attempt_timeout_s: Seconds = 900.0
    call_timeout_s: Seconds = 90.0
    grade_timeout_s: Seconds = 120.0
    # Renewal interval of leases and episodes; shorter for those that last less than 3 of it.
    renew_interval_s: Seconds = 5.0
    # Pause before a failed attempt is retried; doubles with each try.
    retry_pause_s: float = Field(default=0.5, ge=0, le=3600)
    # A longer wait for a lease, for an ended turn of the engine, or for an update of weights is
    # logged with all stacks.
    stall_s: Seconds = 120.0
    dialect: DialectConfig = DialectConfig()
    limits: LimitsConfig = LimitsConfig()
    burn_in: BurnInConfig = BurnInConfig()
    engine: EngineConfig = EngineConfig()
    sampling: SamplersConfig = SamplersConfig()

    def check(self, shared: SharedConfig) -> None:
        self._check_routing_replay(shared)
        if self.engine.kind == "tinker" and (ignored := self._ignored_at_a_service(shared)):
            raise ConfigError("\n  ".join(['rollout.engine.kind = "tinker": leave out', *ignored]))
        if self.max_input_length >= (room := shared.policy.max_model_len):
            raise ConfigError(
                f"policy.max_model_len: {room} is less than rollout.max_input_length + 1,"
                f" {self.max_input_length} + 1: raise the former or lower the latter"
            )

    def _ignored_at_a_service(self, shared: SharedConfig) -> list[str]:
        """Return what only an engine of our own heeds, with the reason."""
        ours = sorted(self.engine.model_fields_set - {"kind", "seeded"})
        found = [f"rollout.engine.{key}: it is an option of vLLM" for key in ours]
        if self.burn_in.answer_tokens is not None:
            found.append("rollout.burn_in.answer_tokens: there is no memory to test")
        if shared.policy.adapter_rank is not None:
            found.append("policy.adapter_rank: learner.lora.rank says it to the service")
        if shared.policy.routing_replay != "off":
            found.append("policy.routing_replay: the service names no experts")
        if shared.policy.vision is not None:
            found.append("policy.vision: the service is shown no pictures")
        if shared.policy.rope_scaling is not None:
            found.append("policy.rope_scaling: the service has positions of its own")
        return found

    def _check_routing_replay(self, shared: SharedConfig) -> None:
        engine = self.engine
        if shared.policy.routing_replay == "off":
            return
        if engine.device == "cpu" and engine.enforce_eager is False:
            raise ConfigError(
                "rollout.engine.enforce_eager: policy.routing_replay records the experts of a CPU's"
                ' engine as its layers run; leave it out, or set policy.routing_replay = "off"'
            )
        if engine.pipeline_parallel > 1:
            raise ConfigError(
                "rollout.engine.options.pipeline_parallel_size: vLLM names no experts across"
                ' stages; leave it out, or set policy.routing_replay = "off"'
            )

    def attempt_limits(self, policy: PolicyConfig) -> AttemptLimits:
        """Return the bounds of an attempt of this policy."""
        return AttemptLimits(
            max_turns=self.max_turns,
            max_input_length=self.max_input_length,
            max_generate_length=self.max_generate_length,
            max_model_len=policy.max_model_len,
            attempt_timeout_s=self.attempt_timeout_s,
            call_timeout_s=self.call_timeout_s,
            grade_timeout_s=self.grade_timeout_s,
            turn_tokens=self.limits.turn_tokens,
            sampled_tokens=self.limits.sampled_tokens,
            thinking_tokens=self.limits.thinking_tokens,
            calls=self.limits.calls,
            parse_errors=self.limits.parse_errors,
            observation_tokens=self.limits.observation_tokens,
            observation_side=self.limits.observation_side,
            continue_turns=self.limits.on_cut == "continue",
            max_images=policy.vision.max_images if policy.vision else 0,
        )

    def burn_in_lengths(self, max_model_len: int) -> BurnInLengths | None:
        """Return the lengths of the burn-in with a policy of this length; None without a
        burn-in."""
        if not self.burn_in.enabled:
            return None
        if self.engine.kind == "tinker":
            # The service is asked once whether it takes a prompt of this length.
            prompt = min(self.max_input_length, max_model_len - 1)
            return BurnInLengths(prompt, 1, self.burn_in.timeout_s)
        longest = min(self.max_generate_length, max_model_len - 1)
        answer = min(self.burn_in.answer_tokens or longest, longest)
        room = max_model_len - answer
        prompt = room if self.limits.on_cut == "continue" else min(self.max_input_length, room)
        return BurnInLengths(prompt, answer, self.burn_in.timeout_s)

    @property
    def burn_in_hints(self) -> BurnInHints:
        """Return what to change first if the burn-in fails."""
        memory = "lower policy.max_model_len, or give the machine more memory"
        if self.engine.device == "cuda":
            share = self.engine.gpu_memory_utilization
            memory = (
                f"lower rollout.engine.gpu_memory_utilization ({share:g}), or policy.max_model_len"
            )
        return BurnInHints(
            memory=memory,
            time=(
                f"raise rollout.burn_in.timeout_s ({self.burn_in.timeout_s:g}), or lower"
                f" rollout.max_generate_length ({self.max_generate_length})"
            ),
        )

    @property
    def options(self) -> WorkerOptions:
        return WorkerOptions(
            max_attempts=self.max_attempts,
            renew_interval_s=self.renew_interval_s,
            retry_pause_s=self.retry_pause_s,
            attempt_timeout_s=self.attempt_timeout_s,
        )

    @model_validator(mode="after")
    def _block_size_fits_the_device(self) -> Self:
        if self.engine.device == "cpu" and (self.engine.block_size or 32) % 32:
            raise ValueError("engine.block_size: must be a multiple of 32 on a CPU")
        return self
