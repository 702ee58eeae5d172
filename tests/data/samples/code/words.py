"""The commonest words of a text."""

from collections import Counter


def commonest(text, count=10):
    words = (word.strip(".,;:!?").lower() for word in text.split())
    return Counter(filter(None, words)).most_common(count)
