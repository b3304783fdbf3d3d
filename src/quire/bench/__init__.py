"""Measuring: throughput, latency and sharing, against an ideal loop or a peer, and a client for servers.

Owns how measurements are taken and compared. Refuses to know: how anything is made faster.
"""
