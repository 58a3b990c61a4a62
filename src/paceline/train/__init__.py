"""Training of drafting heads: the target's own answers, its states, one loss and one loop for every kind of head."""
