"""The short form of the gate `proof.exhaustion`."""

from proof import SHORT, exhaustion


def test_batch_without_its_blocks_changes_nothing():
    figure = exhaustion.measure(SHORT)
    assert figure.holds, figure


def test_pool_that_takes_blocks_before_checking_is_detected():
    assert not exhaustion.planted(SHORT).holds
