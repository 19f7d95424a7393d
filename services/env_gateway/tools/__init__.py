"""Tool calls: selection of the tools offered to a policy, execution and retries of calls."""
