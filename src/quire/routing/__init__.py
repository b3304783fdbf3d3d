"""Which of several engines gets a request: a policy in plain Python, for engines in one process and for replicas.

Owns what is known of each engine: the names of its cached pages, its load, which groups it has. Refuses to know:
tokens' text, jax, and how a request or a report travels.
"""

from quire.routing.prefix_index import PrefixIndex, prompt_hashes
from quire.routing.router import Choice, Load, Router

__all__ = ["Choice", "Load", "PrefixIndex", "Router", "prompt_hashes"]
