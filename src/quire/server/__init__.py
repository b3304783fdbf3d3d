"""An endpoint on top of one engine: OpenAI's HTTP API, gRPC, limits, keys and observability.

Owns the engine's thread, admission, streams and everything that a client can reach. Nothing below imports this.
"""
