"""`mmldlm demo`: a web page on this machine, to sample from a run by hand."""
