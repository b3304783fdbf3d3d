"""An endpoint on top of one engine: OpenAI's HTTP, gRPC, bounds and sight. Nothing below imports this."""
