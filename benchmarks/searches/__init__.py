"""Whether a search of hyper-parameters is worth its price, at the same total epsilon as a run with the defaults."""
