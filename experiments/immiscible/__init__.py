"""Studies of noise assigned to the nearest images."""
