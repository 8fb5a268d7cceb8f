"""Scripts that measure and draw what the library claims: python -m experiments.emd.digits, from the repository root."""
