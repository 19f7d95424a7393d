"""Episodes from open to close, with their tool calls and grades. Start reading at `gateway.py`;
`episode_book.py` is pure."""
