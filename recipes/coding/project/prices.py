"""Prices in cents."""


def with_discount(price, percent):
    """The price less a discount, rounded to the nearest cent; half a cent is rounded up."""
    return price - price * percent // 100
