"""The colors of screenshots."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from PIL import Image


def count_colors(path: Path) -> Counter[bytes]:
    """Return how many pixels have each color (3 bytes: red, green, blue)."""
    with Image.open(path, formats=["PNG"]) as image:
        colors = image.convert("RGB").getcolors(image.width * image.height)
    return Counter({bytes(color): count for count, color in colors or ()})
