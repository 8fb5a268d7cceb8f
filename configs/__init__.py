"""Experiment configs, installed as `jaxdiff.configs`: each file has get_config(arg="") -> ConfigDict."""
