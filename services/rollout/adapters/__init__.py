"""One neighbour each: vLLM, the learner, the gateway, tokenizers and chat templates."""
