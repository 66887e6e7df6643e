"""INT4 weights: what they are, how they are found, how files hold them."""
