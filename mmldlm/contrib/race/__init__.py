"""`mmldlm race`: which of several changes of a run are better than it, with one budget of errors for all of them."""
