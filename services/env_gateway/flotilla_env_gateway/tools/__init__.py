"""The tools offered to a policy: their selection, the `computer` tool, and retries of failed calls
(`call_retries.py`). Pure."""
