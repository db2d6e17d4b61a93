"""``netsum demo``: the same small training twice, through the switch and with plain gloo, and a comparison of the two."""
