"""Scripts to read and to run; `demo.py` first."""
