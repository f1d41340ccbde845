"""Sweeps: many runs of one configuration whose keys vary."""
