"""The name of the Hypothesis profile that CI runs with; known before anything of quire is imported."""

from hypothesis import settings

THOROUGH = "thorough"
settings.register_profile(THOROUGH)
