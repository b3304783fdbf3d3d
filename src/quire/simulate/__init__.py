"""Real schedulers, pages and routing under a clock of events: what a fleet would do with some traffic, without one."""
