"""Adapters to pyarrow, which writes exported episodes."""
