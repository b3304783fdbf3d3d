"""The HTTP server: routes of both ports, their OpenAPI document, and the limits and keys that stand before them."""
