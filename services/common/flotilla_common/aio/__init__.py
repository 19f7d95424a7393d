"""Tasks, signals and bounded collections for asyncio."""
