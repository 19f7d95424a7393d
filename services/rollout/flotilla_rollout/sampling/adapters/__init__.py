"""vLLM as the engine of many samplers."""
