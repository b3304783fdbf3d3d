"""The errors of a group of processes."""


class GroupError(RuntimeError):
    """The group has failed, and its message says which process and why. It does not come back: start it again."""


class ChannelError(GroupError):
    """A connection broke, or brought something that nobody in the group has sent."""


class UnansweredError(ChannelError):
    """Nobody is there, or the other end went away before it said who it is: somebody else may answer later."""


class WrongKeyError(ChannelError):
    """The other end has another key."""
