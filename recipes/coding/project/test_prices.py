from prices import with_discount


def test_half():
    assert with_discount(1000, 50) == 500


def test_cents_are_rounded_to_the_nearest():
    assert with_discount(999, 10) == 899
    assert with_discount(999, 15) == 849
