"""Adapters that several services share: `model_hub.py`, by which models come to a machine, and
`hidden_torch.py`, for processes that read models' texts alone."""
