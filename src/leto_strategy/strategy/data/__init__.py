"""The data of a fit: loaders that a new trainer opens at exactly the batch where another one died."""
