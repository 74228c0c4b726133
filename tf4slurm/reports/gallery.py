"""Which quantities of a job are drawn over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tf4slurm.reports.chart import Chart, make_lines
from tf4slurm.reports.curves import Values, over_tasks
from tf4slurm.reports.job_summary import Story


def make_charts(story: Story) -> list[Chart]:
    """Return the charts of a job, what it reached before what it used; those of which nothing is known, too."""
    curves, end = story.curves, story.timeline.end

    def chart(title: str, unit: str, columns: Sequence[Values]) -> Chart:
        return Chart(title, unit, curves.seconds, make_lines(story.names, dict(enumerate(columns))), end)

    return [
        chart("Steps per second", "", curves.steps),
        *(
            Chart(f"Reported: {name}", "", curves.seconds, make_lines(story.names, by_rank), end)
            for name, by_rank in curves.metrics.items()
        ),
        chart("Memory of each task", "B", curves.memory),
        chart("Cores in use by each task", "", curves.cores),
        *_traffic(story),
    ]


def _traffic(story: Story) -> Iterator[Chart]:
    """Give bytes per second as the sum of each role."""
    for what, columns in (("sent", story.curves.sent), ("received", story.curves.received)):
        roles, sums = story.needs.roles, {}
        for number, role in enumerate(roles):
            each = [column for name, column in zip(story.names, columns, strict=True) if name.partition("/")[0] == role]
            sums[number] = over_tasks(each, sum)
        title = f"Bytes {what} per second, over the ports of each role"
        yield Chart(title, "B/s", story.curves.seconds, make_lines(roles, sums), story.timeline.end)
