"""Sampling for a trainer in the same program: groups of samples from any thread while weights change.

Owns what was submitted and has not been handed out. Refuses to know: event loops, protocols, how a trainer learns.
"""

from quire.rollouts.batch import RolloutBatch
from quire.rollouts.rollouts import RolloutGroup, Rollouts
from quire.rollouts.session import Session

__all__ = ["RolloutBatch", "RolloutGroup", "Rollouts", "Session"]
