"""Text, recipe, loop and state of the reference training."""
