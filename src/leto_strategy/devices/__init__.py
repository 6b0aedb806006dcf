"""What Leto asks about GPUs from outside of torch: NVML and the CUDA driver. No CUDA context is ever made here."""
