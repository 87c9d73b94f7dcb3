"""The one exception that a user is meant to read."""


class UserError(Exception):
    """Something the user can put right: says what is wrong and what to do; the command line exits with status 2."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(f"{what}\n  remedy: {remedy}")
        self.what = what
        self.remedy = remedy

    def __reduce__(self) -> tuple[type["UserError"], tuple[str, str]]:
        return (type(self), (self.what, self.remedy))
