"""Studies of SFD."""
