"""The host column: who runs next and which pages they hold. Plain Python and numpy, no jax."""
