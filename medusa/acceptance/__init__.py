"""Which guesses stay: sampling as a function of the seed, the exact rule, and rules for sampled drafts."""
