"""Counting and turning bits."""


def ones(n):
    count = 0
    while n:
        n &= n - 1
        count += 1
    return count


def reverse(n, width):
    turned = 0
    for _ in range(width):
        turned = turned << 1 | n & 1
        n >>= 1
    return turned
