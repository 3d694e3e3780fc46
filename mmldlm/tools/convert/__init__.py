"""`mmldlm convert`: data of other trainers to Parquet files that `mmldlm prepare` reads."""
