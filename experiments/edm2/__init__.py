"""Studies of EDM2."""
