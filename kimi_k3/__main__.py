"""``python -m kimi_k3`` is the command ``kimi-k3``."""

import sys

from .cli import main

sys.exit(main())
