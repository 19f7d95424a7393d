"""A recorder of experts follows the slots of a KV cache: records of their next owner stay its
own."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = [
    pytest.mark.engine,
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

BLOCK, BLOCKS, LAYERS, CHOSEN = 2, 6, 3, 2


def make_request(blocks: list[int], start: int = 0, *, wanted: bool = True) -> Any:
    """A running request as the model runner knows it."""
    extra = {"flotilla_experts_from": start} if wanted else None
    return SimpleNamespace(
        block_ids=(None, blocks), sampling_params=SimpleNamespace(extra_args=extra)
    )


def make_step(**given: Any) -> Any:
    """The scheduler's output at the start of a step."""
    resumed = given.pop("resumed", set[str]())
    empty: dict[str, Any] = {
        "preempted_req_ids": None,
        "finished_req_ids": set(),
        "kv_cache_block_copies": None,
        "scheduled_cached_reqs": SimpleNamespace(resumed_req_ids=resumed),
    }
    return SimpleNamespace(**(empty | given))


class Worker:
    """A model runner with two groups of layers, of which the second keeps all tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, experts: int = 300, kept: int = 2) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

        from flotilla_rollout.adapters import vllm_routing

        shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        groups = [
            SimpleNamespace(
                kv_cache_spec=SlidingWindowSpec(block_size=4, sliding_window=2, **shape),
                layer_names=["near"],
            ),
            SimpleNamespace(
                kv_cache_spec=FullAttentionSpec(block_size=BLOCK, **shape), layer_names=["far"]
            ),
        ]
        self.requests: dict[str, Any] = {}
        self.model = torch.nn.Module()
        self.model_config = SimpleNamespace(
            get_num_experts=lambda: experts,
            get_num_experts_per_tok=lambda: CHOSEN,
            get_total_num_hidden_layers=lambda: LAYERS,
        )
        self.kv_cache_config = SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=groups)
        self.begun: list[Any] = []
        self._update_states: Any = self.begun.append
        self._slots: dict[str, torch.Tensor] = {}
        monkeypatch.setattr(
            vllm_routing,
            "get_forward_context",
            lambda: SimpleNamespace(slot_mapping=self._slots),
        )
        monkeypatch.setattr(vllm_routing, "bind_routed_experts_capturer", lambda *_: None)
        self.recorder = vllm_routing.ExpertRecorder(self, kept)

    def begin_step(self, **given: Any) -> None:
        self._update_states(make_step(**given))

    def compute(self, slots: list[int], first: int) -> None:
        """Have the second layer choose `first` and the expert after it for all of these slots."""
        self._slots = {"near": torch.zeros(1), "far": torch.tensor([*slots, -1])}
        chosen = torch.tensor([[first, first + 1]] * len(slots) + [[-9, -9]])
        self.recorder.capture(1, chosen)

    def first_choices(self, request: str) -> list[int] | None:
        """Return the first expert that the second layer chose for each token."""
        found = self.recorder.take_record(request)
        if found is None:
            return None
        shape, size, data = found
        return np.frombuffer(data, f"<u{size}").reshape(shape)[:, 1, 0].tolist()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    return Worker(monkeypatch)


def test_what_a_request_chose_is_read_once_it_has_ended(worker: Worker) -> None:
    worker.requests["a-01"] = make_request([4, 1])
    worker.compute([8, 9, 2], 290)
    assert worker.first_choices("b") is None
    worker.begin_step(finished_req_ids={"a-01"})
    del worker.requests["a-01"]
    worker.compute([8, 9, 2, 3], 7)
    assert worker.first_choices("a") == [290, 290, 290, 0]
    assert worker.first_choices("a") is None
    assert len(worker.begun) == 1


def test_it_is_read_of_one_whose_end_has_not_been_reported_yet(worker: Worker) -> None:
    worker.requests["a-01"] = make_request([0, 1], start=3)
    worker.compute([0, 1, 2, 3], 5)
    assert worker.first_choices("a") == [5]


def test_a_preempted_request_keeps_what_it_had_until_it_is_computed_again(worker: Worker) -> None:
    for name in ("a-01", "b-01"):
        worker.requests[name] = make_request([0])
    worker.compute([0, 1], 5)
    worker.begin_step(preempted_req_ids={"a-01", "b-01"})
    worker.compute([0, 1], 50)
    worker.begin_step(finished_req_ids={"a-01"}, resumed={"b-01"})
    worker.requests["b-01"] = make_request([3])
    worker.compute([6, 7], 20)
    worker.begin_step(finished_req_ids={"b-01"})
    assert worker.first_choices("a") == [5, 5]
    assert worker.first_choices("b") == [20, 20]


def test_a_copied_block_takes_its_experts_along(worker: Worker) -> None:
    worker.compute([2, 3], 11)
    worker.requests["a-01"] = make_request([5])
    worker.begin_step(kv_cache_block_copies=[(1, 5)])
    worker.compute([2, 3], 1)
    assert worker.first_choices("a") == [11, 11]


def test_records_that_no_request_fetches_are_forgotten(worker: Worker) -> None:
    for index in range(3):
        worker.requests[f"r{index}-01"] = make_request([index])
        worker.begin_step(finished_req_ids={f"r{index}-01"})
        del worker.requests[f"r{index}-01"]
    assert [worker.first_choices(f"r{index}") is None for index in range(3)] == [True, False, False]


def test_a_request_for_none_is_not_recorded(worker: Worker) -> None:
    worker.requests["a-01"] = make_request([0], wanted=False)
    worker.begin_step(finished_req_ids={"a-01"})
    assert worker.first_choices("a") is None


def test_a_model_without_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"policy\.routing_replay: this model has no experts"):
        Worker(monkeypatch, experts=0)
