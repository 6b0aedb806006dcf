"""The erasure code over GF(2^32) that lets retained state lose pages. Paper section 4.3; docs/erasure_code.md.

This package exports nothing itself, so that its torch-free parts stay so; public are
`code.ErasureCode` (`encode`, `update`, `verify`, `reconstruct`, `with_num_data`), `second_tier.TwoTierCode`,
`pages.PageTable` and `pages.Pages` (how pages are given: tensor [N, W] int32, sequence of tensors [W], or addresses),
`backends.backend_for` and `backend.Backend` (the seam for devices), `solve.solve` (the e x e system),
`generator.generator`, `additive_fft.block_twiddles` (coefficients), `reference` (the code by its definition),
`errors.TooManyErasures`. `field`, `solve`, `additive_fft` and `compiler` are plain Python; all others load torch.
"""
