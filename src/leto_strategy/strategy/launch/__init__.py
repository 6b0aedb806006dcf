"""A call of the Trainer as processes: the user's, which waits, the trainers, which run, and the result between them."""
