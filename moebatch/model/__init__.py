"""What is computed: the mathematics of one layer. Knows no schedule, no tier and no request."""
