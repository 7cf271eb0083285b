"""A text with several owners: a mail to Bob is Bob's too."""

from collections.abc import Sequence


class Writer(str):
    """The name of who wrote a document that is not theirs alone: it is its `others`' too.

    Wherever only its writer matters, it is that name; whatever stores documents keeps the others.

    >>> ann = Writer(["ann", "bob"])
    >>> ann == "ann", owners_of(ann), owners_of("ann")
    (True, ('ann', 'bob'), ('ann',))
    """

    others: tuple[str, ...]

    def __new__(cls, names: Sequence[str]) -> "Writer":
        writer = super().__new__(cls, names[0])
        writer.others = (*names[1:],)
        return writer

    def __getnewargs__(self) -> tuple[tuple[str, ...]]:  # type: ignore[override]
        return (owners_of(self),)


def owners_of(user: str) -> tuple[str, ...]:
    """All owners of a document, its writer first."""
    return (str(user), *(user.others if isinstance(user, Writer) else ()))


def has_co_owners(users: Sequence[str]) -> bool:
    """Whether somebody's document is not theirs alone."""
    return any(isinstance(user, Writer) for user in users)
