"""The two ways a run ends badly: the user's mistake (exit code 2) and everything else (exit code 1)."""


class SatlensError(Exception):
    """Something failed that the user could not have prevented; the message says what and where."""


class UserError(SatlensError):
    """A mistake in the request: the message is one line that says what was wrong and what to do next."""
