"""Watching a server: Prometheus metrics, OpenTelemetry, traces of steps and requests. Refuses to know: transports."""
