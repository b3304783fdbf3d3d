"""Watching a server: metrics, traces, logs and the page at /debug."""
