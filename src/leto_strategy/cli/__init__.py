"""The command `leto`: looks at running jobs, injects faults, checks the machine. It never loads torch or Lightning."""
