"""From the release's format and a plan to a finished build."""
