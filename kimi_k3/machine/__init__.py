"""What this machine is and whether it is set up right."""
