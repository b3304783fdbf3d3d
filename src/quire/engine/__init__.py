"""The loop over both columns: schedule, pack, run, commit.

Owns the engine, what it checks of a request, its statistics, what it asks of a runner, and the packer, where a plan in
host terms becomes arrays. Refuses to know: how tokens are chosen, who calls it and over which protocol.
"""
