"""``python -m kimi_k3`` is the command ``kimi-k3``."""

from .cli import main

raise SystemExit(main())
