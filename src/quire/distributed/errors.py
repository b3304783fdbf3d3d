"""The errors of a group of processes."""


class GroupError(RuntimeError):
    """The group has failed, and its message says which process and why. It does not come back: start it again."""


class ChannelError(GroupError):
    """A connection broke, or brought something that nobody in the group has sent."""


class WrongKeyError(ChannelError):
    """The other end has another key."""
