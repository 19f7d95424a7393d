"""Tool calls: which tools a policy is offered, and how a call is made and repeated."""
