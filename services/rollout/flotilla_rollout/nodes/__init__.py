"""`python -m flotilla_rollout.nodes`: a further machine of a rollout whose engine spans several."""
