"""vLLM with nothing but a model folder: prints logprobs of tokens 1.. of a prompt, as JSON.

Run as a module: FOLDER IDS, the latter as JSON.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.vllm_options import ServedModel, engine_options, set_environment
from flotilla_rollout.config.rollout import EngineConfig


def main(folder: Path, ids: list[int]) -> list[float]:
    config = EngineConfig(device="cpu", max_num_seqs=2)
    set_environment(config, local=True)
    from vllm import LLM, SamplingParams, TokensPrompt

    policy = PolicyConfig(model=str(folder), dtype="float32", max_model_len=128)
    options = engine_options(config, ServedModel(folder, policy, []))
    for name in ("worker_extension_cls", "weight_transfer_config"):
        del options[name]
    engine: Any = LLM(**options, skip_tokenizer_init=True)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)
    rows = zip(answer.prompt_logprobs[1:], ids[1:], strict=True)
    return [row[token].logprob for row, token in rows]


if __name__ == "__main__":
    # What vLLM prints on standard output is not the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(main(Path(sys.argv[1]), json.loads(sys.argv[2]))), file=answers, flush=True)
    os._exit(0)
