"""Checkpoints on disk: names, formats, folder checks."""
