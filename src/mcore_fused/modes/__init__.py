"""The two modes, and the decision between them."""
