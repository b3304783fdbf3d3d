"""The loop, what it checks of a request, its statistics, and the packer: the only file where both columns meet."""
