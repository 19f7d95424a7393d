"""`python -m services.rollout.nodes`: a further machine of a rollout whose engine spans several."""
