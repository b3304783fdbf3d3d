"""One model over several processes: the leader schedules and serves, followers run the steps that it sends them.

`channel` and `codec` are the wire, and know no jax; `group` is what all processes agree on; `leader` and `follower` are
the two ends.
"""
