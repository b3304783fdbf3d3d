"""The host column: who runs next and which pages they hold.

Owns requests, sequences, the queue, plans, every page id and refcount, and the judgement of what a step produced. Plain
Python and numpy. Refuses to know: jax, arrays on a device, text.
"""
