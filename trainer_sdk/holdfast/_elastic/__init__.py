"""Training worlds that change while their processes stay."""
