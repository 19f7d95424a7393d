"""The service by Tinker's own client."""
