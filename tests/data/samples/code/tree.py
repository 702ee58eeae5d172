"""A binary search tree of pairs."""


def insert(tree, key, value):
    if tree is None:
        return [key, value, None, None]
    side = 2 if key < tree[0] else 3
    tree[side] = insert(tree[side], key, value)
    return tree


def find(tree, key):
    while tree is not None and tree[0] != key:
        tree = tree[2 if key < tree[0] else 3]
    return None if tree is None else tree[1]
