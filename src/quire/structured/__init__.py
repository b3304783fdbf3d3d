"""Constrained output: what a form is, its compiler into token masks, and the process in which a form is tried first.

Owns everything that knows llguidance. Refuses to know: sampling, sequences, devices.
"""
