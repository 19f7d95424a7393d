"""Adapters of the rollout's neighbours: vLLM, learner, gateway, tokenizers, chat templates."""
