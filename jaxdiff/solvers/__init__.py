"""Solvers of the probability-flow ODE and the grids they run on."""

from jaxdiff.solvers.gits import gits
from jaxdiff.solvers.grids import GRIDS, grid
from jaxdiff.solvers.sample import analytic_first_step, solve
from jaxdiff.solvers.steps import (
    SOLVERS,
    Solver,
    ancestral,
    dpm2,
    dpmpp2m,
    dpmpp3m,
    euler,
    heun,
    ipndm,
    make,
    sde_dpmpp2m,
    unipc,
)

__all__ = [
    "GRIDS",
    "SOLVERS",
    "Solver",
    "analytic_first_step",
    "ancestral",
    "dpm2",
    "dpmpp2m",
    "dpmpp3m",
    "euler",
    "gits",
    "grid",
    "heun",
    "ipndm",
    "make",
    "sde_dpmpp2m",
    "solve",
    "unipc",
]
