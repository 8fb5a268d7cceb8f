"""Studies of a network's activations as features."""
