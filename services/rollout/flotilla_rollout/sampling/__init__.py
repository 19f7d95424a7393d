"""`python -m flotilla_rollout.sampling`: samples from an engine at callers' requests, with weights
that they name. Start reading at `samplers.py`.

`weight_turns.py` decides which whole model the engine holds; `order_checks.py` and
`weight_folders.py` refuse what the engine would answer wrongly or not at all."""
