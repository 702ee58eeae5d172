"""Products of matrices given as lists of rows."""


def transpose(matrix):
    return [list(column) for column in zip(*matrix, strict=True)]


def product(left, right):
    columns = transpose(right)
    return [[dot(row, column) for column in columns] for row in left]


def dot(left, right):
    return sum(a * b for a, b in zip(left, right, strict=True))
