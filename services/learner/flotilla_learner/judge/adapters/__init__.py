"""Endpoints that judge."""
