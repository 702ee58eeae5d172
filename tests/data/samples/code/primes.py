"""Primes below a bound."""


def primes(bound):
    sieve = bytearray([1]) * bound
    sieve[:2] = b"\0\0"
    for n in range(2, int(bound**0.5) + 1):
        if sieve[n]:
            sieve[n * n :: n] = bytes(len(range(n * n, bound, n)))
    return [n for n, prime in enumerate(sieve) if prime]
