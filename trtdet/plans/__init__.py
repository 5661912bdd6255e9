"""Which convolutions stay out of INT8: what each costs in accuracy, and the choice among them."""
