"""Adapters that several services share: `model_hub.py`, by which models come to a machine,
`token_text.py`, which shows tokens as text, and `hidden_torch.py`, for processes that read models'
texts alone."""
