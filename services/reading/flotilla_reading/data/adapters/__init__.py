"""Adapters to what tasks come from: any store of fsspec, the Hugging Face hub, Fleet's API; and to
parquet files."""
