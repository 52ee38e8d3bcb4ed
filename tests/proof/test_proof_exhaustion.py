"""The short form of the gate `proof.exhaustion`."""

from proof import SHORT, exhaustion


def test_batch_without_its_blocks_changes_nothing():
    figure = exhaustion.measure(SHORT)
    assert figure.holds, figure


def test_pool_that_takes_before_it_knows_is_convicted():
    assert not exhaustion.planted(SHORT).holds
