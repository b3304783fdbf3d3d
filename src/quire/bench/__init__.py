"""Measuring: throughput, latency and sharing against the ideal loop, and a client for servers."""
