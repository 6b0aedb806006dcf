"""The processes of a job: the supervisor, what it starts, watches, fences off and promotes. Standard library only."""
