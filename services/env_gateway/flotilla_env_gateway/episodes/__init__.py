"""Episodes from open to close, with their tool calls and grades. Start reading at `gateway.py`;
`episode_book.py` is pure. `limits/episode_admission.py` decides who opens next,
`tools/call_retries.py` which calls are repeated."""
