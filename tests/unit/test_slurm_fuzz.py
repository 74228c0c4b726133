"""Malformed environments and nodelists raise only errors of tf4slurm. `make fuzz` runs many more examples."""

from __future__ import annotations

import contextlib
from functools import cached_property

from hypothesis import given
from hypothesis import strategies as st

from tests.captures import CAPTURES
from tf4slurm.errors import Tf4SlurmError
from tf4slurm.slurm.environ import SlurmAllocation, SlurmStep
from tf4slurm.slurm.gpus import gpu_environ
from tf4slurm.slurm.nodelist import expand_nodelist, fold_nodelist

ENVIRONS = [environ for capture in CAPTURES for environ in capture.environs]
READ = sorted(
    {
        name
        for environ in ENVIRONS
        for name in environ
        if name.startswith(("SLURM_STEP", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_DIST", "SLURM_ARRAY", "SLURMD"))
    }
    | {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_HET_SIZE", "SLURM_GPUS_ON_NODE"}
    | {"CUDA_VISIBLE_DEVICES", "SLURM_RESTART_COUNT", "SLURM_NTASKS"}
)
VALUES = sorted({value for environ in ENVIRONS for name, value in environ.items() if name in READ})
TEXTS = st.one_of(
    st.text("n019[]-,(x) .", max_size=30),
    st.text(max_size=20),
    st.sampled_from(VALUES),
    st.integers(-1, 10**30).map(str),
    st.tuples(st.sampled_from(VALUES), st.integers(0, 30), st.text("n09[]-,(x)", max_size=3)).map(
        lambda broken: broken[0][: broken[1]] + broken[2] + broken[0][broken[1] :]
    ),
)
ATTRIBUTES = [name for name, value in vars(SlurmStep).items() if isinstance(value, (property, cached_property))]


@given(
    environ=st.sampled_from(ENVIRONS),
    changes=st.dictionaries(st.sampled_from(READ), st.none() | TEXTS, min_size=1, max_size=3),
)
def test_malformed_environment_is_parsed_or_refused(environ: dict[str, str], changes: dict[str, str | None]) -> None:
    changed = {name: value for name, value in {**environ, **changes}.items() if value is not None}
    with contextlib.suppress(Tf4SlurmError):
        SlurmAllocation.from_environ(changed)
    with contextlib.suppress(Tf4SlurmError):
        step = SlurmStep.from_environ(changed)
        for attribute in ATTRIBUTES:
            with contextlib.suppress(Tf4SlurmError):
                getattr(step, attribute)
        nodes_by_rank = step.nodes_by_rank
        assert len(nodes_by_rank) == step.num_tasks
        assert nodes_by_rank[step.rank] == step.node_name
        sees_gpus = [True] * nodes_by_rank.count(step.node_name)
        gpu_environ(step.visible_devices, step.gpus_on_node, step.local_rank, sees_gpus)


@given(nodelist=TEXTS)
def test_malformed_nodelist_is_expanded_or_refused(nodelist: str) -> None:
    with contextlib.suppress(Tf4SlurmError):
        nodes = expand_nodelist(nodelist)
        assert expand_nodelist(fold_nodelist(nodes)) == nodes
