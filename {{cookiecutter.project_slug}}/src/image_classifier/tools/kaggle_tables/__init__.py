"""Tables of labels as Kaggle and other programs have them: other columns, Parquet."""
