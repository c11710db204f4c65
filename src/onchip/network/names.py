"""Names that users type: case-insensitive, and an unknown one is rejected with the nearest known name.
Names of values and weights: unique.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

from onchip.errors import InputError, OnchipError

MAX_COMPARED = 120  # characters of a name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint with the known name nearest to an unknown one; "" if none is near."""
    import difflib  # only on errors: it takes a while to load

    by_key = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name[:MAX_COMPARED].lower(), by_key, 1)
    return f"did you mean {by_key[near[0]]}?" if near else ""


def known_name(
    name: object, known: Iterable[str], what: str, hint: str = "", error: type[OnchipError] = InputError
) -> str:
    """`name` as spelt in `known`, in any case; else an error that suggests the nearest one.

    what  the kind of name, for the message: "device"
    hint  used if no known name is near
    """
    names = list(known)
    for other in names:
        if isinstance(name, str) and name.lower() == other.lower():
            return other
    near = did_you_mean(name, names) if isinstance(name, str) else ""
    raise error(f"unknown {what}", got=str(name), expected=", ".join(names), hint=near or hint)


def match_names(patterns: Sequence[str], names: Sequence[str], what: str) -> dict[str, str]:
    """Each name that a pattern matches ("fc1.*"; * ? [abc] as in a shell), with the first one that does.

    InputError for a pattern that matches no name.

    what  the patterns, for the message: "frozen"
    """
    from fnmatch import fnmatchcase

    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            wider = (other for other in (f"*.{pattern}", f"{pattern}.*", f"*{pattern}*"))
            near = next((other for other in wider if any(fnmatchcase(name, other) for name in names)), "")
            raise InputError(
                f"{what} matches no weight", got=pattern, expected=f"a pattern of {', '.join(names)}",
                hint=f"did you mean {near}?" if near else did_you_mean(pattern, names) or "a name of net.weights",
            )  # fmt: skip
    first = ((name, next((each for each in patterns if fnmatchcase(name, each)), None)) for name in names)
    return {name: pattern for name, pattern in first if pattern is not None}


def free_name(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or 'wanted_2', 'wanted_3' ... if that is taken."""
    name, count = wanted, 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name
