"""The site's tools, by domain."""
