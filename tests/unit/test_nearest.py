"""The names that error messages suggest for misspelled ones."""

from __future__ import annotations

import pytest

from tf4slurm.cli.main import _VERBS
from tf4slurm.spec.batch_spec import BatchSpec
from tf4slurm.spec.options import nearest, options_by_key

OPTIONS = tuple(options_by_key(BatchSpec))
JOBS = ("train-20261123-101010", "train-20261124-112233", "4711", "4712", "digits-4811")
TASKS = ("chief/*", "ps/*", "worker/*", "chief/0", "ps/0", "worker/0", "worker/1")


@pytest.mark.parametrize(
    ("names", "typos"),
    [
        (
            OPTIONS,
            "worker=workers wokers=workers num-workers=workers n-workers=workers number-of-workers=workers "
            "evaluator=evaluators partiton=partition parition=partition acount=account time-limit=time "
            "gpu-per-worker=gpus-per-worker port=ports interfce=interface intefrace=interface max-attempt=max-attempts "
            "max_worker_restart=max-worker-restarts grace=grace-period heartbeat-timout=heartbeat-timeout "
            "stop-sginal=stop-signal run-directory=runs-directory runs-dir=runs-directory requeu=requeue modul=module "
            "cpus-per-tasks=cpus-per-task ntask=ntasks ntasks-pernode=ntasks-per-node memory=mem "
            "mem_percpu=mem-per-cpu job-nam=job-name mailtype=mail-type snapshots=snapshot chef=chief pss=ps "
            "control-prot=control-port "
            "data-worker=data-workers require-server=require-servers start-time=start-timeout PARTITION=partition",
        ),
        (
            tuple(_VERBS),
            "rnu=run submt=submit sumbit=submit stauts=status statsu=status log=logs lgos=logs lsit=list listt=list "
            "wiat=wait cancle=cancel cacnel=cancel reume=resume resum=resume reprot=report tensorbord=tensorboard "
            "doctr=doctor docter=doctor tets=test tst=test configs=config conf=config node=nodes tasks=task "
            "completions=completion scripts=script",
        ),
        (JOBS, "digit=digits-4811 digits=digits-4811 train-20261124=train-20261124-112233"),
        (TASKS, "wroker/1=worker/1 worker1=worker/1 chef/0=chief/0 cheif/0=chief/0"),
    ],
)
def test_misspelled_name_has_one_nearest_name(names: tuple[str, ...], typos: str) -> None:
    pairs = [typo.split("=") for typo in typos.split()]
    assert {typo: nearest(typo, names) for typo, _ in pairs} == {typo: [name] for typo, name in pairs}


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("gpus", OPTIONS, {"gpus-per-node", "gpus-per-task", "gpus-per-worker"}),
        ("trian", JOBS, set(JOBS[:2])),
        ("4713", JOBS, {"4711", "4712"}),
        ("p", OPTIONS, set()),
        ("verbose", OPTIONS, set()),
        ("frobnicate", tuple(_VERBS), set()),
        ("anything", (), set()),
    ],
)
def test_several_or_no_names_are_nearest(name: str, names: tuple[str, ...], expected: set[str]) -> None:
    assert set(nearest(name, names)) == expected
