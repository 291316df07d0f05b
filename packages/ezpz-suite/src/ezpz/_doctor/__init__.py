"""``ezpz doctor``: finds the checks, runs each in a process of its own, and shows what they say."""
