"""`mmldlm compare`: the paired difference of two runs, or of two configs that it trains."""
