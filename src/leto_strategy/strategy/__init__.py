"""The PyTorch Lightning side of Leto; the only package that knows Lightning."""
