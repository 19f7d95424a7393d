"""Adapters that several services share: `model_hub.py` fetches models, `token_text.py` decodes
tokens for display, `hidden_torch.py` keeps torch out of processes that only handle text, and
`bounded_http.py` reads answers of HTTP servers."""
