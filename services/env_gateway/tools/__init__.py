"""The tools that a policy is offered: their selection, the `computer` tool, and when a failed call
is repeated (`call_retries.py`). Pure."""
