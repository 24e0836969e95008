"""Errors that a user can act on."""


class UserError(Exception):
    """Something the user asked for cannot be done; the message says what was wrong, the value, and what is allowed.

    The command line prints the message as one line and exits with code 2.
    """
