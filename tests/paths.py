"""Where the arrays made by public implementations lie."""

from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"
