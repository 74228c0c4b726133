"""The sizes of closures, and the completed steps of each worker."""

from __future__ import annotations

import pytest

from tf4slurm.tensorflow.step_scheduler import CLOSURE_SECONDS, StepScheduler


def closure_sizes(scheduler: StepScheduler, step_seconds: float, closures: int, max_steps: int = 1_000) -> list[int]:
    """Return the sizes of closures that one worker runs one after another, at this duration of a step."""
    now, taken = 0.0, []
    for _ in range(closures):
        steps = scheduler.take(max_steps)
        now += steps * step_seconds
        scheduler.add_completed(0, steps, {"loss": 2.0 * steps}, now)
        taken.append(steps)
    return taken


def test_closures_grow_to_their_target_duration() -> None:
    scheduler = StepScheduler(1, expected_steps=10_000)
    scheduler.set_limit(10_000)
    taken = closure_sizes(scheduler, CLOSURE_SECONDS / 40, 12)
    assert taken[0] == 1
    assert taken[-1] == 32  # the power of two below 40
    assert len(set(taken)) <= 4  # each size is traced
    assert scheduler.completed == sum(taken) == scheduler.sums["loss"] / 2


def test_closures_of_a_short_training_stay_small() -> None:
    """The closures of 500 steps would take longer to trace than they save."""
    sizes = {}
    for steps in (50, 500, 5_000):
        scheduler = StepScheduler(1, expected_steps=steps)
        scheduler.set_limit(10_000)
        sizes[steps] = closure_sizes(scheduler, CLOSURE_SECONDS / 40, 12)[-1]
    assert sizes == {50: 1, 500: 4, 5_000: 32}


def test_long_steps_get_closures_of_one_step() -> None:
    scheduler = StepScheduler(1, expected_steps=10_000)
    scheduler.set_limit(100)
    assert set(closure_sizes(scheduler, 3 * CLOSURE_SECONDS, 8)) == {1}


def test_closures_have_at_most_max_steps() -> None:
    scheduler = StepScheduler(1, expected_steps=10_000)
    scheduler.set_limit(10_000)
    assert max(closure_sizes(scheduler, 1e-6, 10, max_steps=5)) == 4


def test_last_closures_have_the_remaining_steps() -> None:
    scheduler = StepScheduler(2, steps_per_call=4, expected_steps=100)
    scheduler.set_limit(11)
    assert [scheduler.take(1) for _ in range(5)] == [4, 4, 2, 1, 0]
    scheduler.set_limit(13)
    assert [scheduler.take(1) for _ in range(2)] == [2, 0]
    scheduler.add_completed(1, 4, {})
    assert scheduler.steps_by_worker == [0, 4]


def test_stopped_scheduler_schedules_nothing() -> None:
    scheduler = StepScheduler(1, steps_per_call=4, expected_steps=100)
    scheduler.set_limit(10)
    assert scheduler.take(1) == 4
    scheduler.stop()
    assert scheduler.take(1) == 0


def test_scheduler_starts_with_the_size_of_an_earlier_one() -> None:
    scheduler = StepScheduler(1, expected_steps=10_000)
    scheduler.set_limit(10_000)
    closure_sizes(scheduler, CLOSURE_SECONDS / 40, 12)
    later = StepScheduler(1, closure_steps=scheduler.closure_steps, expected_steps=100)
    later.set_limit(100)
    assert later.take(1_000) == 32


@pytest.mark.parametrize("num_workers", [64, 256, 500])
@pytest.mark.parametrize("step_seconds", [0.01, 0.2, 1.0, 4.0])
def test_many_workers_run_at_most_100_closures_a_second(num_workers: int, step_seconds: float) -> None:
    scheduler = StepScheduler(num_workers, expected_steps=10_000_000)
    scheduler.set_limit(10_000_000)
    now = 0.0
    for _ in range(20):  # rounds in which each worker runs a closure
        taken = [scheduler.take(64) for _ in range(num_workers)]
        now += taken[0] * step_seconds
        for worker, steps in enumerate(taken):
            scheduler.add_completed(worker, steps, {}, now - 1e-3 * (num_workers - worker))
    closure_seconds = scheduler.take(64) * step_seconds
    assert num_workers / closure_seconds <= 101 or step_seconds == 0.01  # at most 64 steps
    assert closure_seconds <= max(2 * num_workers / 100, step_seconds)


def test_long_steps_are_not_limited_by_their_graph() -> None:
    for step_seconds, expected in ((0.05, 1), (0.2, 16)):
        scheduler = StepScheduler(256, expected_steps=10_000_000)
        scheduler.set_limit(10_000_000)
        now = 0.0
        for _ in range(3_000):
            steps = scheduler.take(1)
            now += steps * step_seconds / 256
            scheduler.add_completed(0, steps, {}, now)
        assert scheduler.take(1) == expected
