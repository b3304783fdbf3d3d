"""The device column: models, paged attention and the sampler as compiled programs over donated arrays.

Owns weights, the KV cache, their layout and their place on a mesh. Refuses to know: requests, sequences, who runs and
why, text.
"""
