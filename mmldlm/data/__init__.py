"""Data from raw text to batches: corpora, tokenizer, latent encoders, the store of shards and its loader."""
