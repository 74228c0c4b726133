"""The timeline and the curves of a job as one SVG file, for papers and slides."""

from __future__ import annotations

import re
from pathlib import Path

from tf4slurm.reports.chart import HEIGHT, Chart, draw_chart, stroke
from tf4slurm.reports.chart import WIDTH as CHART_WIDTH
from tf4slurm.reports.drawing import text
from tf4slurm.reports.gallery import make_charts
from tf4slurm.reports.job_summary import Story
from tf4slurm.reports.timeline_chart import WIDTH, draw_timeline

_CSS = Path(__file__).with_name("page.css")
_MARGIN, _TITLE, _LEGEND_ROW = 20, 26, 18
_KEYS_PER_ROW, _STATES_PER_ROW = 4, 8


def make_picture(story: Story) -> str:
    """Return the picture, in the colours of paper."""
    timeline = story.timeline
    drawing, _ = draw_timeline(timeline, timeline.start, timeline.end, story.cause)
    parts, y = [], float(_MARGIN)
    for number, state in enumerate(timeline.states):
        x = 8 + (number % _STATES_PER_ROW) * WIDTH / _STATES_PER_ROW
        parts.append(f'<rect class="s-{state}" x="{x:g}" y="{y:g}" width="16" height="10"/>')
        parts.append(text(x + 22, y + 9, state))
    y += _TITLE
    height = _height_of(drawing)
    parts.append(_placed(drawing, 0, y, WIDTH, height))
    y += height + _MARGIN
    charts = [(chart, made) for chart in make_charts(story) if (made := draw_chart(chart))]
    for left, right in zip(charts[::2], [*charts[1::2], None], strict=False):
        row = [left, *([right] if right else [])]
        for column, (chart, made) in enumerate(row):
            x = column * (WIDTH - CHART_WIDTH)
            parts.append(text(x + 8, y + 14, chart.title))
            parts.append(_placed(made, x, y + _TITLE, CHART_WIDTH, HEIGHT))
            parts.append(_keys(chart, x + 8, y + _TITLE + HEIGHT + 12))
        rows = max(-(-len(chart.lines) // _KEYS_PER_ROW) for chart, _ in row)
        y += _TITLE + HEIGHT + rows * _LEGEND_ROW + _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" width="{WIDTH}" height="{y:g}" '
        f'style="max-width:100%;height:auto" font-family="sans-serif">'
        f'<style>{_style()}</style><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _style() -> str:
    """Return what page.css says of drawings, with its colours written out: few programs but browsers know variables."""
    css = _CSS.read_text(encoding="utf-8")
    colours = dict(re.findall(r"(--[\w-]+):\s*([^;]+);", css.partition("@media")[0]))
    return re.sub(r"var\((--[\w-]+)\)", lambda match: colours[match[1]], css.partition("/* drawings */")[2])


def _placed(drawing: str, x: float, y: float, width: float, height: float) -> str:
    inner = re.sub(r' (?:data-chart|role|aria-label|class)="[^"]*"', "", drawing.partition(">")[0])
    where = f' x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}">'
    return inner + where + drawing.partition(">")[2]


def _height_of(drawing: str) -> float:
    return float(drawing.partition('viewBox="')[2].partition('"')[0].split()[3])


def _keys(chart: Chart, x: float, y: float) -> str:
    parts = []
    for number, each in enumerate(chart.lines):
        at_x = x + (number % _KEYS_PER_ROW) * (CHART_WIDTH - 20) / _KEYS_PER_ROW
        at_y = y + number // _KEYS_PER_ROW * _LEGEND_ROW
        parts += [stroke(each, f"M{at_x:g} {at_y:g}h22"), text(at_x + 28, at_y + 4, each.name[:16], "tick")]
    return "".join(parts)
