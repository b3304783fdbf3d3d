"""The HTTP server: routes, and the limits and keys that stand before them."""
