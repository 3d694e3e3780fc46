"""`mmldlm race`: find the changes of a run that make it better, with one budget of errors for all of them."""
