"""The HTTP server: Starlette on uvicorn."""
