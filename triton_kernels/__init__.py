"""Triton kernels of Leto, imported as `leto_strategy.triton_kernels`: the erasure code and the update of chunks.

| module | what |
|---|---|
| `pages`, `chunk_pages`, `tile_flags` | where a kernel reads and writes, checked once |
| `parity` | `encode`, `update`, `apply_matrix`, `reconstruct`, `xor` |
| `adam` | the numbers of a step, with the bits of the torch step that it replaces |
| `chunk_update` | `update_chunk`, `restore`, and the two ways that they choose from |
| `launch_shapes` | how those are cut and ordered |
| `warm_up` | `warm_up`, `preload`: compiled before they are needed |
| `compiler`, `assembler`, `ahead` | which ptxas, which products, which cache |
| `references` | the same in plain torch |

A file here imports torch, triton and its neighbours, and nothing else of ours.
"""
