"""Weights, configs and tokenizers from files and from the hub. Nothing in a file is ever executed."""
