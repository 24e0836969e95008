"""What goes wrong with a checkpoint."""

from jaxserve.errors import UserError


class CheckpointError(UserError):
    """A checkpoint cannot be used; the message is one line that names the file and the tensor or field at fault."""
