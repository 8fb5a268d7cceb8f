"""Studies of EM Distillation."""
