"""`mmldlm compare`: the paired difference of two runs."""
