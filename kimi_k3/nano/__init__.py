"""A Kimi K3 small enough for any machine, for the demo and the tests."""
