"""The report as a file of the kind that its name asks for."""

from __future__ import annotations

from pathlib import Path

from tf4slurm.errors import MissingDependencyError, RunDirectoryError
from tf4slurm.reports.job_summary import Story
from tf4slurm.reports.picture import make_picture
from tf4slurm.reports.report import make_report

_ZOOM = 2
_FONTS = ("DejaVu Sans", "Liberation Sans", "Noto Sans", "Open Sans", "Roboto", "Arial", "Helvetica")
_LETTER = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20" font-family="sans-serif">'
    '<text y="15">{}</text></svg>'
)


def make_file(story: Story, name: str | Path) -> bytes:
    """Return what is to be in a file of this name: .svg and .png have the drawings alone, .html or no ending all.

    Raises:
        RunDirectoryError: It ends otherwise.
        MissingDependencyError: A PNG needs the package resvg_py, and one of a few fonts.
    """
    ending = Path(name).suffix.lower()
    if ending == ".png":
        return _draw(make_picture(story))
    if ending == ".svg":
        return make_picture(story).encode("utf-8", "replace")
    if ending in ("", ".html", ".htm"):
        return make_report(story).encode("utf-8", "replace")
    raise RunDirectoryError(
        f"{str(name)!r} would be a {ending[1:].upper()} file, which is not made here. Give a name that ends in .html, "
        ".svg or .png, or print the .html from a browser.",
        path=str(name),
    )


def _draw(svg: str) -> bytes:
    """Return an SVG as a PNG, two pixels for each of its own."""
    try:
        import resvg_py
    except ImportError as error:
        raise MissingDependencyError(
            'A PNG is drawn by the package resvg_py, which is not here. Install it: pip install "tf4slurm[png]"; or '
            "write an .svg.",
            package="resvg_py",
        ) from error

    def draw(drawing: str, font: str) -> bytes:
        """In that font alone: where one is not here, resvg would draw its serif font."""
        return bytes(resvg_py.svg_to_bytes(svg_string=drawing, sans_serif_family=font, serif_family=font, zoom=_ZOOM))

    for font in _FONTS:
        if draw(_LETTER.format("M"), font) != draw(_LETTER.format(""), font):
            return draw(svg, font)
    raise MissingDependencyError(
        f"This host has no font that is known here to draw the words of a PNG: {', '.join(_FONTS)}. Install one (on "
        "Debian fonts-dejavu-core), or write an .svg.",
        package="fonts",
    )
