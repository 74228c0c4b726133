"""Run simulated jobs: `python -m tests.simulation SEEDS [--first N] [--jobs 2]`, or one with `--seed N -v`."""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence

from tests.simulation.job import Violation
from tests.simulation.mutations import MOST_SEEDS, MUTATIONS, find
from tests.simulation.run import run_seed, run_seeds

_BLOCK = 200


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("seeds", nargs="?", type=int, default=20_000, help="number of seeds (default 20,000)")
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default 2)")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("-v", "--verbose", action="store_true", help="with --seed: print the whole history")
    parser.add_argument("--mutations", action="store_true", help="put faults back, and count seeds until each is found")
    options = parser.parse_args(arguments)
    if options.mutations:
        return _find_mutations(options.first, options.jobs)
    if options.seed is not None:
        return _show(options.seed, is_verbose=options.verbose)
    started, violations, done = time.monotonic(), 0, 0
    for count, found in _run_blocks(options.first, options.seeds, options.jobs):
        done += count
        violations += len(found)
        for violation in found:
            print(f"seed {violation.seed}: {violation.invariant}: {violation.text}")
            print(f"  repeat it: python -m tests.simulation --seed {violation.seed} -v", flush=True)
    seconds = time.monotonic() - started
    print(f"{done} seeds, {violations} violations ({seconds:.0f} s)")
    return int(violations > 0)


def _run_blocks(first: int, count: int, jobs: int) -> Iterator[tuple[int, list[Violation]]]:
    blocks = [range(begin, min(begin + _BLOCK, first + count)) for begin in range(first, first + count, _BLOCK)]
    if jobs == 1:
        for block in blocks:
            yield len(block), run_seeds(block)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for block, found in zip(blocks, pool.imap(run_seeds, blocks), strict=True):
            yield len(block), found


def _find_mutations(first: int, jobs: int) -> int:
    """Print for each mutation the number of seeds until an invariant is violated; fail if one is not found."""
    is_complete = True
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=1) as pool:
        for found in pool.imap(functools.partial(find, first=first), MUTATIONS):
            text = f"{found.seeds} seeds: {found.invariant}" if found.seeds else f"not within {MOST_SEEDS} seeds"
            print(f"{found.mutation}: {text}", flush=True)
            is_complete = is_complete and found.seeds is not None
    return int(not is_complete)


def _show(seed: int, *, is_verbose: bool) -> int:
    violations, jobs = run_seed(seed)
    for job in jobs:
        if is_verbose:
            print(job.plan)
            for at, kind, rank, text in job.history:
                print(f"{at:9.3f}  {kind:20} {'' if rank is None else rank!s:4} {text}")
        print(f"outcome: {job.state.outcome}")
    for violation in violations:
        print(f"{violation.invariant}: {violation.text}")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main())
