"""Constrained output: what a form is, its compiler into token masks, and the process in which a form is tried first."""
