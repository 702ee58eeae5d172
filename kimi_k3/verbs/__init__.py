"""The verbs of the command line: one file each, in the order of ``table.py``."""
