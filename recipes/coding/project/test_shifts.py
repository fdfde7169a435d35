from shifts import length, total


def test_a_shift_of_one_day():
    assert length((480, 990)) == 510


def test_a_shift_past_midnight():
    assert length((1320, 360)) == 480


def test_the_total_of_both_kinds():
    assert total([(480, 990), (1320, 360)]) == 990
