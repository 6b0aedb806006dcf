"""Triton kernels of Leto, imported as `leto_strategy.triton_kernels`.

There is no kernel here yet: those of the erasure code and of the fused update come with the CUDA release.
A file here imports torch and triton and nothing of ours.
"""
