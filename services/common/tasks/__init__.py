"""Tasks in Fleet's JSON, checked before anything else reads them."""
