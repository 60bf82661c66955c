"""The one exception for mistakes that the user can mend."""


class UserError(ValueError):
    """The user's input is wrong.

    The message is one line that names the value, what was expected and the remedy. The command line prints it without a
    traceback and exits with code 2.
    """
