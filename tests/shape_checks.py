"""The run-time type checker that tests put around every annotated function of jaxdiff: ints may stand for floats."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
