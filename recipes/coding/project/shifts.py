"""Working shifts: (start, end) in minutes since midnight. A shift that ends before it starts runs past midnight."""


def length(shift):
    """Minutes of a shift."""
    start, end = shift
    return end - start


def total(shifts):
    """Minutes of all shifts."""
    return sum(length(shift) for shift in shifts)
