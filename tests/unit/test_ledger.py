"""How many steps a closure gets, and who is said to have done them."""

from __future__ import annotations

from tf4slurm.tensorflow.ledger import CLOSURE_SECONDS, Ledger


def portions(ledger: Ledger, step_seconds: float, closures: int, most: int = 1_000) -> list[int]:
    """Take closures one after another, as a worker does that needs so long for a step."""
    now, taken = 0.0, []
    for _ in range(closures):
        steps = ledger.take(most)
        now += steps * step_seconds
        ledger.enter(0, steps, {"loss": 2.0 * steps}, now)
        taken.append(steps)
    return taken


def test_closures_grow_until_they_take_as_long_as_they_should() -> None:
    ledger = Ledger(1)
    ledger.open(10_000)
    taken = portions(ledger, CLOSURE_SECONDS / 40, 12)
    assert taken[0] == 1
    assert taken[-1] == 32  # the power of two below 40
    assert len(set(taken)) <= 4  # each size is traced
    assert ledger.done == sum(taken) == ledger.sums["loss"] / 2


def test_long_steps_go_one_by_one() -> None:
    ledger = Ledger(1)
    ledger.open(100)
    assert set(portions(ledger, 3 * CLOSURE_SECONDS, 8)) == {1}


def test_a_closure_is_no_larger_than_its_graph_may_be() -> None:
    ledger = Ledger(1)
    ledger.open(10_000)
    assert max(portions(ledger, 1e-6, 10, most=5)) == 4


def test_the_last_closure_has_the_rest_and_then_there_is_none() -> None:
    ledger = Ledger(2, steps_per_call=4)
    ledger.open(11)
    assert [ledger.take(1) for _ in range(5)] == [4, 4, 2, 1, 0]
    ledger.open(13)
    assert [ledger.take(1) for _ in range(2)] == [2, 0]
    ledger.enter(1, 4, {})
    assert ledger.steps_by_worker == [0, 4]


def test_a_closed_ledger_hands_out_nothing() -> None:
    ledger = Ledger(1, steps_per_call=4)
    ledger.open(10)
    assert ledger.take(1) == 4
    ledger.close()
    assert ledger.take(1) == 0


def test_an_account_may_begin_where_an_earlier_one_was() -> None:
    ledger = Ledger(1)
    ledger.open(10_000)
    portions(ledger, CLOSURE_SECONDS / 40, 12)
    later = Ledger(1, portion=ledger.portion)
    later.open(100)
    assert later.take(1_000) == 32
