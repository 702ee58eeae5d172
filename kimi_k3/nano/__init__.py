"""A trained K3 of 3.8 million parameters: demo, tests and benchmarks run on it.

How it was made, what it knows and its two sisters: ``benchmarks/nano``.
"""

from pathlib import Path

#: The shipped checkpoint, in Moonshot's source format, with its tokenizer.
NANO_FOLDER = Path(__file__).parent / "checkpoint"
