"""Makes builds of Kimi K3 and verifies them."""
