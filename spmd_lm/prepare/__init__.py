"""`spmd-lm prepare`: from raw documents to a data set of tokens, cleaned, without duplicates and leaks, and split."""
