"""The Hypothesis profiles, known before anything of quire is imported: no example has to be fast."""

from hypothesis import HealthCheck, settings

THOROUGH = "thorough"
"""What CI runs with."""
_SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("daily", **_SETTINGS)
settings.register_profile(THOROUGH, **_SETTINGS)
settings.load_profile("daily")
