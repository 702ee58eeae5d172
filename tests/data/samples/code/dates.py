"""The weekday of a date, by Zeller's rule."""

NAMES = ["Saturday", "Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]


def weekday(year, month, day):
    if month < 3:
        year, month = year - 1, month + 12
    century, rest = divmod(year, 100)
    place = day + 13 * (month + 1) // 5 + rest + rest // 4 + century // 4 - 2 * century
    return NAMES[place % 7]
