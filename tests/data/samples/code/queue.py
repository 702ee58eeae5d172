"""A ring of fixed size."""


class Ring:
    def __init__(self, size):
        self.slots = [None] * size
        self.head = self.count = 0

    def push(self, item):
        if self.count == len(self.slots):
            raise OverflowError("the ring is full")
        self.slots[(self.head + self.count) % len(self.slots)] = item
        self.count += 1

    def pop(self):
        if not self.count:
            raise IndexError("the ring is empty")
        item = self.slots[self.head]
        self.head = (self.head + 1) % len(self.slots)
        self.count -= 1
        return item
