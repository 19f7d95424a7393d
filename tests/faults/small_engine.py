"""An engine that follows a script but scores and updates like a real one.

What it writes solves the task in about half of the attempts. The logprobs of what it wrote, and
the canary's, are computed from the weights that it has loaded.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from itertools import chain
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from flotilla_common.images.picture import ShownPicture
from flotilla_environments.reference_policies import plan_calls
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.ports import EngineDead, EngineError
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import Completion, PolicySpan, Publication, Sampling
from tests.faults.small_policy import Array, token_logprobs

ANSWER = "<|im_start|>assistant\n"
QUESTION = "<|im_start|>user\n"


class SmallEngine(FakeEngine):
    """Knows the tasks of the files in `folder` by their prompts; takes `turn_s` seconds for a
    turn."""

    def __init__(
        self, tokenizer: Tokenizer, turn_end_id: int, folder: Path, *, turn_s: float
    ) -> None:
        super().__init__(tokenizer, turn_end_id)
        # A run's spec may be in the same folder.
        files = [json.loads(path.read_text()) for path in folder.glob("*.json")]
        listed = [file["tasks"] for file in files if "tasks" in file]
        self._tasks: dict[str, Any] = {task["prompt"]: task for task in chain(*listed)}
        self._words = tokenizer
        self._end = turn_end_id
        self._turn_s = turn_s
        self._weights: dict[str, Array] = {}

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        if self.death.done():
            raise EngineDead(self.death.result())
        await asyncio.sleep(min(self._turn_s, timeout_s))
        policy, weights = self.policy, self._weights
        if policy is None:
            raise EngineError("no policy is loaded")
        text = self._turn(self._words.decode(token_ids.tolist()), sampling.seed)
        ids = [*self._words.encode(text), self._end]
        # It samples nothing before its whole turn is there.
        timed_out = timeout_s < self._turn_s
        kept = np.array([] if timed_out else ids[:max_tokens], np.int32)
        scores = token_logprobs(weights, np.concatenate([token_ids, kept]))
        spans = (PolicySpan(policy, len(kept)),) if len(kept) else ()
        logprobs = scores[len(scores) - len(kept) :]
        return Completion(kept, logprobs, spans, cut=len(ids) > max_tokens, timed_out=timed_out)

    def _turn(self, text: str, seed: int) -> str:
        """The next call of the plan; a lazy half of the attempts reports done at once, and
        so does the answer to a prompt without a task."""
        if QUESTION not in text:
            return "<done>"
        question = text.split(QUESTION, 1)[1].split("<|im_end|>", 1)[0]
        # The task's variables come before its prompt.
        known = [prompt for prompt in self._tasks if question.endswith(prompt)]
        calls = plan_calls(self._tasks[max(known, key=len)])
        turn = text.count(ANSWER) - 1
        if turn >= len(calls) or random.Random(seed).random() < 0.5:
            return "<done>"
        name, arguments = calls[turn]
        body = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>\n{body}\n</tool_call>"

    async def load_weights(self, publication: Publication, path: Path) -> None:
        self._weights = load_file(path)
        await super().load_weights(publication, path)

    async def compute_logprobs(
        self, token_ids: NDArray[np.int32], pictures: Sequence[ShownPicture] = ()
    ) -> NDArray[np.float32]:
        return token_logprobs(self._weights, token_ids)
