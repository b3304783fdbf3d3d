"""The device column: arrays and programs, in jax. Knows no request and no policy."""
