"""Experiment configs: each file has get_config(arg="") -> ConfigDict, and ARGUMENTS, the arguments it takes.

ARGUMENTS is a dict literal of names and what they change, which `jaxdiff configs` reads without running the file.
"""
