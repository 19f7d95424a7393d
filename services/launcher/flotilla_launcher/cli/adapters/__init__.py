"""Models that play tasks for `flotilla env try`: behind an endpoint, or served by vLLM here."""
