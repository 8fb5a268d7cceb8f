"""The configs of a source checkout, which lie beside the package; an installed jaxdiff has them in this place."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "configs")]
