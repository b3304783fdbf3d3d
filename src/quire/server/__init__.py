"""An endpoint on top of one engine: OpenAI's HTTP API, gRPC, limits, keys and observability.

Owns everything that a client can reach; requests go to an `AsyncLLM`. Nothing below imports this.
"""
