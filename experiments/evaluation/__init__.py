"""Weights of the feature networks: checked, and for the digits trained."""
