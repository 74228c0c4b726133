"""Compare a site's profile with what Slurm has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tf4slurm.doctor.finding import Finding, warn_unless
from tf4slurm.settings import Setting
from tf4slurm.slurm.parsing import SlurmSite, parse_time_limit


def check_profile(settings: Mapping[str, Setting], site: SlurmSite) -> Iterator[Finding]:
    """Check the partition, the time limit, the type of GPU and the constraint that the settings request.

    `settings` are those of `read_settings`. QOS and account are not checked: Slurm lists them only with accounting.
    """

    def value(name: str) -> str:
        return str(settings[name].value) if name in settings else ""

    partitions = {each.name: each for each in site.partitions}
    present = {"partition": partitions.keys(), "gpu_type": site.gpu_types, "constraint": site.features}
    for name, names in present.items():
        if value(name):
            option = f"--{name.replace('_', '-')}"
            yield warn_unless(
                all(each in names for each in value(name).replace("&", ",").replace("|", ",").split(",")),
                topic="profile",
                text=f"{option} {value(name)} of {settings[name].origin}",
                problem=f" does not exist here; there is {', '.join(sorted(names)) or 'none'}",
                advice=f"Change it in the file, or give {option}.",
            )
    default = next((each.name for each in site.partitions if each.is_default), "")
    partition = partitions.get(value("partition") or default)
    limit, requested = parse_time_limit(partition.max_time if partition else ""), parse_time_limit(value("time"))
    if partition and requested is not None:
        yield warn_unless(
            limit is None or requested <= limit,
            topic="profile",
            text=f"--time {value('time')} of {settings['time'].origin}",
            problem=f" exceeds the limit of partition {partition.name}, {partition.max_time}",
            advice="Change it in the file, or give --time.",
        )
    for name in ("qos", "account"):
        if value(name):
            text = f"--{name} {value(name)} of {settings[name].origin} was not checked; sbatch --test-only checks it"
            yield Finding("ok", "profile", text)
