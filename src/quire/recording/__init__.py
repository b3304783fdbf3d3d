"""What an engine was asked and what it decided, in a file; and the same decisions again, without a device."""
