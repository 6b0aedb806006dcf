"""The Resilient Memory Pool (paper section 4): a state manager owns retained memory, trainers and shadows map it.

Everything here but `tensors` is standard library and ctypes only; import the modules, this package exports nothing.
"""
